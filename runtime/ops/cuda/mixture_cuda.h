// The mixture of layer.h on the GPU. How many rows an expert has never leaves the device: groups
// are those of runtime/kernels/expert_groups.h. Weight gradients are summed in FP32 straight from
// BF16 operands: the weighted activations and the gradients of the router and of the shared
// expert's gate are rounded to BF16 before that, which the composites do not do. Statistics of the
// routing are FP64.

#pragma once

#include "runtime/ops/layer.h"

namespace oom {

at::Tensor CudaMixtureForward(const ModelDescription& model, const LayerDescription& layer,
                              const LayerTensors& weights, const at::Tensor& h_TH,
                              MixtureSaved* saved, const MixtureOptions& options);

at::Tensor CudaMixtureBackward(const ModelDescription& model, const LayerDescription& layer,
                               const LayerTensors& weights, const at::Tensor& dy_TH,
                               const MixtureSaved& saved, LayerTensors* gradients,
                               const LoadBalanceTerm& balance);

}  // namespace oom
