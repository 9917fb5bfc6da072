#include "runtime/ops/delta_segment.h"

namespace oom {
namespace {

// One document's row among those of `count` documents that carry nothing; undefined stays
// undefined.
at::Tensor Among(const at::Tensor& row, int64_t document, int64_t count) {
  if (!row.defined() || count == 1) return row;
  std::vector<int64_t> sizes = row.sizes().vec();
  sizes[0] = count;
  at::Tensor rows = at::zeros(sizes, row.options());
  rows.narrow(0, document, 1).copy_(row);
  return rows;
}

GatedDeltaNetState Among(const GatedDeltaNetState& state, int64_t document, int64_t count) {
  return {.convolution_DPC = Among(state.convolution_DPC, document, count),
          .rule_DNKV = Among(state.rule_DNKV, document, count)};
}

GatedDeltaNetState OneDocument(const GatedDeltaNetState& state, int64_t document) {
  const auto row = [&](const at::Tensor& rows) {
    // A copy, so that the other documents' rows are freed.
    return rows.defined() ? rows.narrow(0, document, 1).clone() : rows;
  };
  return {.convolution_DPC = row(state.convolution_DPC), .rule_DNKV = row(state.rule_DNKV)};
}

}  // namespace

GatedDeltaNetShape DeltaNetShapeOf(const ModelDescription& model,
                                   const DeltaNetDescription& delta) {
  return {.key_heads = delta.key_head_count,
          .value_heads = delta.value_head_count,
          .key_size = delta.key_head_size,
          .value_size = delta.value_head_size,
          .rms_epsilon = model.norm.epsilon};
}

GatedDeltaNetState StatesBefore(const SequenceSegment& segment, const GatedDeltaNetState& carried) {
  if (!segment.continues) return {};
  return Among(carried, 0, segment.document_count());
}

GatedDeltaNetState StateAfter(const SequenceSegment& segment, const GatedDeltaNetState& states) {
  if (!segment.continued) return {};
  return OneDocument(states, segment.document_count() - 1);
}

GatedDeltaNetState StateGradientsAfter(const SequenceSegment& segment,
                                       const GatedDeltaNetState& carried) {
  if (!segment.continued) return {};
  return Among(carried, segment.document_count() - 1, segment.document_count());
}

GatedDeltaNetState StateGradientBefore(const SequenceSegment& segment,
                                       const GatedDeltaNetState& gradients) {
  if (!segment.continues) return {};
  return OneDocument(gradients, 0);
}

}  // namespace oom
