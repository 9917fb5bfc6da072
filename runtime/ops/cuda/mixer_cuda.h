// The mixer of layer.h on the GPU. Weight gradients, and the gradient of the normed input, are
// summed in FP32 straight from BF16 operands.

#pragma once

#include "runtime/ops/layer.h"

namespace oom {

at::Tensor CudaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                            const LayerTensors& weights, const at::Tensor& x_TH,
                            const PackedBatch& batch, MixerSaved* saved, HeadRange heads);

at::Tensor CudaMixerBackward(const ModelDescription& model, const LayerDescription& layer,
                             const LayerTensors& weights, const at::Tensor& dh_TH,
                             const MixerSaved& saved, const PackedBatch& batch,
                             LayerTensors* gradients);

// FinishMixer and BeginMixerBackward of models with branch norms.
at::Tensor CudaFinishMixer(const ModelDescription& model, const LayerTensors& weights,
                           const at::Tensor& x_TH, const at::Tensor& sum_TH, at::Tensor* output_TH);
at::Tensor CudaBeginMixerBackward(const ModelDescription& model, const LayerTensors& weights,
                                  const at::Tensor& dh_TH, const at::Tensor& output_TH,
                                  LayerTensors* gradients);

}  // namespace oom
