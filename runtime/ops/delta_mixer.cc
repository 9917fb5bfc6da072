#include "runtime/ops/delta_mixer.h"

#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/delta_segment.h"
#include "runtime/ops/device_operators.h"
#include "runtime/ops/rms_norm.h"

namespace oom {

DeltaMixerOutput DeltaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                                   const LayerTensors& weights, const at::Tensor& x_TH,
                                   const SequenceSegment& segment, const GatedDeltaNetState& state,
                                   DeltaMixerSaved* saved) {
  OOM_CHECK_MSG(!model.branch_norms, "no family has branch norms on Gated DeltaNet");
  if (const DeviceOperators* device = MixerOperatorsFor(x_TH, layer)) {
    return device->delta_mixer_forward(model, layer, weights, x_TH, segment, state, saved);
  }
  const at::Tensor x = x_TH.narrow(0, segment.first, segment.tokens());
  GatedDeltaNetSaved core;
  GatedDeltaNetOutput output = GatedDeltaNetForward(
      DeltaNetShapeOf(model, layer.delta_net), weights.delta_net,
      RmsNormForward(x, weights.input_norm, model.norm), StatesBefore(segment, state),
      segment.cu_seqlens, saved == nullptr ? nullptr : &core);
  DeltaMixerOutput result;
  result.h_TH = output.y_TH.add_(x);
  result.state = StateAfter(segment, output.state);
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
  if (const DeviceOperators* device = MixerOperatorsFor(dh_TH, layer)) {
    return device->delta_mixer_backward(model, layer, weights, dh_TH, dstate, saved, gradients);
  }
  const SequenceSegment& segment = saved.segment;
  const at::Tensor dh = dh_TH.narrow(0, segment.first, segment.tokens());
  GatedDeltaNetSaved core = saved.core;
  core.input_TH = RmsNormForward(saved.input_TH, weights.input_norm, model.norm);
  GatedDeltaNetGradients of_core = GatedDeltaNetBackward(
      DeltaNetShapeOf(model, layer.delta_net), weights.delta_net, dh,
      StateGradientsAfter(segment, dstate), core, segment.cu_seqlens, &gradients->delta_net);
  DeltaMixerGradients result;
  result.state = StateGradientBefore(segment, of_core.state);
  result.x_TH = RmsNormBackward(of_core.x_TH, saved.input_TH, weights.input_norm, model.norm,
                                gradients->input_norm)
                    .add_(dh)
                    .to(dh.scalar_type());
  return result;
}

}  // namespace oom
