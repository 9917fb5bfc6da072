// Formulas and shapes as in runtime/ops/delta_mixer.cc.

#include "runtime/ops/cuda/delta_mixer_cuda.h"

#include <utility>

#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/cuda/gated_delta_net_cuda.h"
#include "runtime/ops/delta_segment.h"

namespace oom {

DeltaMixerOutput CudaDeltaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                                       const LayerTensors& weights, const at::Tensor& x_TH,
                                       const SequenceSegment& segment,
                                       const GatedDeltaNetState& state, DeltaMixerSaved* saved) {
  const at::Tensor x = x_TH.narrow(0, segment.first, segment.tokens());
  GatedDeltaNetSaved core;
  GatedDeltaNetOutput output = CudaGatedDeltaNetForward(
      DeltaNetShapeOf(model, layer.delta_net), weights.delta_net,
      NormForward(x, weights.input_norm, model.norm), StatesBefore(segment, state),
      DeltaNetBatch(segment), saved == nullptr ? nullptr : &core);
  DeltaMixerOutput result;
  result.h_TH = output.y_TH.add_(x);
  result.state = StateAfter(segment, output.state);
  if (saved != nullptr) {
    core.input_TH.reset();  // The normed rows are recomputed.
    *saved = {.segment = segment, .input_TH = x, .core = std::move(core)};
  }
  return result;
}

DeltaMixerGradients CudaDeltaMixerBackward(const ModelDescription& model,
                                           const LayerDescription& layer,
                                           const LayerTensors& weights, const at::Tensor& dh_TH,
                                           const GatedDeltaNetState& dstate,
                                           const DeltaMixerSaved& saved, LayerTensors* gradients) {
  const SequenceSegment& segment = saved.segment;
  const at::Tensor dh = dh_TH.narrow(0, segment.first, segment.tokens());
  GatedDeltaNetSaved core = saved.core;
  core.input_TH = NormForward(saved.input_TH, weights.input_norm, model.norm);
  const GatedDeltaNetGradients of_core = CudaGatedDeltaNetBackward(
      DeltaNetShapeOf(model, layer.delta_net), weights.delta_net, dh,
      StateGradientsAfter(segment, dstate), core, DeltaNetBatch(segment), &gradients->delta_net);
  core.input_TH.reset();
  DeltaMixerGradients result;
  result.state = StateGradientBefore(segment, of_core.state);
  result.x_TH = at::empty_like(dh);
  NormBackward({.dy_RH = of_core.x_TH,
                .x_RH = saved.input_TH,
                .weight_H = weights.input_norm,
                .rule = model.norm,
                .residual_gradient_RH = dh,
                .dweight_H = gradients->input_norm},
               result.x_TH);
  return result;
}

}  // namespace oom
