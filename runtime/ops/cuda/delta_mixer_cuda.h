// The mixer of delta_mixer.h on the GPU: the core of gated_delta_net_cuda.h between norms of its
// own.

#pragma once

#include "runtime/ops/delta_mixer.h"

namespace oom {

DeltaMixerOutput CudaDeltaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                                       const LayerTensors& weights, const at::Tensor& x_TH,
                                       const SequenceSegment& segment,
                                       const GatedDeltaNetState& state, DeltaMixerSaved* saved);

DeltaMixerGradients CudaDeltaMixerBackward(const ModelDescription& model,
                                           const LayerDescription& layer,
                                           const LayerTensors& weights, const at::Tensor& dh_TH,
                                           const GatedDeltaNetState& dstate,
                                           const DeltaMixerSaved& saved, LayerTensors* gradients);

}  // namespace oom
