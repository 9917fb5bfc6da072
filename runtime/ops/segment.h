// A sequence segment as the recurrent operators see it: documents packed one after another, of
// which the first may go on from an earlier segment and the last may go on in a later one. What a
// document carries across (a state, a convolution's context) is one row of a tensor [D, ...].
// Document d is tokens [cu_seqlens[d], cu_seqlens[d + 1]); one without tokens hands on what it was
// given. Thread-safe: pure functions.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/ops/aten.h"

namespace oom {

inline void CheckSegment(const std::vector<int64_t>& cu_seqlens, int64_t tokens) {
  OOM_CHECK_MSG(tokens > 0, "a segment has at least one token");
  OOM_CHECK(cu_seqlens.size() > 1 && cu_seqlens.front() == 0 && cu_seqlens.back() == tokens);
  for (size_t i = 1; i < cu_seqlens.size(); ++i) OOM_CHECK(cu_seqlens[i - 1] <= cu_seqlens[i]);
}

// Zeros where `carried_D` is undefined: then every document starts, or ends, in this segment.
inline at::Tensor CarriedBy(const at::Tensor& carried_D, int64_t document, at::IntArrayRef sizes,
                            const at::TensorOptions& options) {
  if (!carried_D.defined()) return at::zeros(sizes, options);
  OOM_CHECK(carried_D.sizes().slice(1) == sizes);
  return carried_D.select(0, document).to(options);
}

// Tokens [first, first + tokens()) of a packed sequence, and the documents among them.
struct SequenceSegment {
  int64_t first = 0;
  std::vector<int64_t> cu_seqlens;  // Within the segment, as above; no document is empty.
  bool continues = false;           // The first document began in an earlier segment.
  bool continued = false;           // The last document goes on in a later one.
  at::Tensor document_starts;       // PackedBatch's: of the whole batch, where the tensors are.

  int64_t tokens() const { return cu_seqlens.back(); }
  int64_t document_count() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
};

// REQUIRES: 0 <= first < end <= the batch's tokens.
inline SequenceSegment CutSegment(const std::vector<int64_t>& batch_cu_seqlens,
                                  const at::Tensor& document_starts, int64_t first, int64_t end) {
  OOM_CHECK(first >= 0 && first < end && end <= batch_cu_seqlens.back());
  SequenceSegment segment{.first = first,
                          .cu_seqlens = {0},
                          .continues = true,
                          .continued = true,
                          .document_starts = document_starts};
  for (const int64_t start : batch_cu_seqlens) {
    if (start == first) segment.continues = false;
    if (start == end) segment.continued = false;
    if (start > first && start < end && start - first > segment.cu_seqlens.back()) {
      segment.cu_seqlens.push_back(start - first);
    }
  }
  segment.cu_seqlens.push_back(end - first);
  return segment;
}

}  // namespace oom
