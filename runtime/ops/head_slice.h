// The heads of a mixer's part, and where its rows (or columns, in `output`) lie in the weights.

#pragma once

#include "runtime/base/check.h"
#include "runtime/model/description.h"
#include "runtime/ops/aten.h"
#include "runtime/ops/layer.h"

namespace oom {

struct HeadSlice {
  HeadSlice(const ModelDescription& model, HeadRange range)
      : whole(range.count < 0 || range.count == model.query_head_count),
        query_heads(range.count < 0 ? model.query_head_count : range.count) {
    const int64_t group = model.query_head_count / model.kv_head_count;
    OOM_CHECK(range.first >= 0 && range.first + query_heads <= model.query_head_count);
    OOM_CHECK_MSG(range.first % group == 0 && query_heads % group == 0,
                  "a head group must cover whole key/value heads");
    kv_heads = query_heads / group;
    query_first_row = range.first * model.head_size;
    query_rows = query_heads * model.head_size;
    kv_first_row = range.first / group * model.head_size;
    kv_rows = kv_heads * model.head_size;
  }

  at::Tensor Query(const at::Tensor& w) const { return w.narrow(0, query_first_row, query_rows); }
  at::Tensor KeyValue(const at::Tensor& w) const { return w.narrow(0, kv_first_row, kv_rows); }
  at::Tensor Output(const at::Tensor& w) const { return w.narrow(1, query_first_row, query_rows); }

  bool whole;
  int64_t query_heads;
  int64_t kv_heads = 0;
  int64_t query_first_row = 0;
  int64_t query_rows = 0;
  int64_t kv_first_row = 0;
  int64_t kv_rows = 0;
};

}  // namespace oom
