#include "runtime/ops/delta_mixer.h"

#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/rms_norm.h"

namespace oom {
namespace {

GatedDeltaNetShape ShapeOf(const ModelDescription& model, const DeltaNetDescription& delta) {
  return {.key_heads = delta.key_head_count,
          .value_heads = delta.value_head_count,
          .key_size = delta.key_head_size,
          .value_size = delta.value_head_size,
          .rms_epsilon = model.norm.epsilon};
}

// One document's row among those of `count` documents that carry nothing; undefined stays undefined.
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

DeltaMixerOutput DeltaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                                   const LayerTensors& weights, const at::Tensor& x_TH,
                                   const SequenceSegment& segment, const GatedDeltaNetState& state,
                                   DeltaMixerSaved* saved) {
  OOM_CHECK_MSG(!model.branch_norms, "no family has branch norms on Gated DeltaNet");
  const at::Tensor x = x_TH.narrow(0, segment.first, segment.tokens());
  const int64_t documents = segment.document_count();
  GatedDeltaNetSaved core;
  GatedDeltaNetOutput output = GatedDeltaNetForward(
      ShapeOf(model, layer.delta_net), weights.delta_net,
      RmsNormForward(x, weights.input_norm, model.norm),
      segment.continues ? Among(state, 0, documents) : GatedDeltaNetState(), segment.cu_seqlens,
      saved == nullptr ? nullptr : &core);
  DeltaMixerOutput result;
  result.h_TH = output.y_TH.add_(x);
  if (segment.continued) result.state = OneDocument(output.state, documents - 1);
  if (saved != nullptr) {
    core.input_TH.reset();  // The normed rows are recomputed.
    *saved = {.segment = segment, .input_TH = x, .core = std::move(core)};
  }
  return result;
}

DeltaMixerGradients DeltaMixerBackward(const ModelDescription& model, const LayerDescription& layer,
                                       const LayerTensors& weights, const at::Tensor& dh_TH,
                                       const GatedDeltaNetState& dstate,
                                       const DeltaMixerSaved& saved, LayerTensors* gradients) {
  const SequenceSegment& segment = saved.segment;
  const at::Tensor dh = dh_TH.narrow(0, segment.first, segment.tokens());
  const int64_t documents = segment.document_count();
  GatedDeltaNetSaved core = saved.core;
  core.input_TH = RmsNormForward(saved.input_TH, weights.input_norm, model.norm);
  GatedDeltaNetGradients of_core = GatedDeltaNetBackward(
      ShapeOf(model, layer.delta_net), weights.delta_net, dh,
      segment.continued ? Among(dstate, documents - 1, documents) : GatedDeltaNetState(), core,
      segment.cu_seqlens, &gradients->delta_net);
  DeltaMixerGradients result;
  if (segment.continues) result.state = OneDocument(of_core.state, 0);
  result.x_TH = RmsNormBackward(of_core.x_TH, saved.input_TH, weights.input_norm, model.norm,
                                gradients->input_norm)
                    .add_(dh)
                    .to(dh.scalar_type());
  return result;
}

}  // namespace oom
