// The heads of a mixer's part, and where its rows (or columns, in `output`) lie in the weights.

#pragma once

#include "runtime/base/check.h"
#include "runtime/model/description.h"
#include "runtime/ops/aten.h"
#include "runtime/ops/layer.h"

namespace oom {

struct HeadSlice {
  HeadSlice(const AttentionDescription& attention, HeadRange range)
      : whole(range.count < 0 || range.count == attention.query_head_count),
        query_heads(range.count < 0 ? attention.query_head_count : range.count),
        head_size(attention.head_size),
        head_rows(attention.output_gate ? 2 * head_size : head_size),
        first_query_head(range.first) {
    const int64_t group = attention.query_head_count / attention.kv_head_count;
    OOM_CHECK(range.first >= 0 && range.first + query_heads <= attention.query_head_count);
    OOM_CHECK_MSG(range.first % group == 0 && query_heads % group == 0,
                  "a head group must cover whole key/value heads");
    first_kv_head = range.first / group;
    kv_heads = query_heads / group;
  }

  // With an output gate, a head's rows are its query's, then its gate's.
  at::Tensor Query(const at::Tensor& w) const {
    return w.narrow(0, first_query_head * head_rows, query_heads * head_rows);
  }
  at::Tensor KeyValue(const at::Tensor& w) const {
    return w.narrow(0, first_kv_head * head_size, kv_width());
  }
  at::Tensor Output(const at::Tensor& w) const {
    return w.narrow(1, first_query_head * head_size, query_width());
  }

  bool gated() const { return head_rows > head_size; }
  int64_t query_width() const { return query_heads * head_size; }
  int64_t kv_width() const { return kv_heads * head_size; }

  bool whole;
  int64_t query_heads;
  int64_t head_size;
  int64_t head_rows;  // Of the query projection, a head.
  int64_t first_query_head;
  int64_t first_kv_head = 0;
  int64_t kv_heads = 0;
};

}  // namespace oom
