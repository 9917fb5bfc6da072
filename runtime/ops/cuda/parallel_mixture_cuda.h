// The mixture of parallel_mixture.h on the GPU: a dense MLP and routed experts side by side. Like
// mixture_cuda.h otherwise; the gradient of the mixture's input is added up wide and rounded once.
// Called by mixture_cuda.cc alone.

#pragma once

#include "runtime/ops/layer.h"

namespace oom {

// `saved` receives all that backward needs.
at::Tensor CudaParallelMixtureForward(const ModelDescription& model, const LayerTensors& weights,
                                      const at::Tensor& h_TH, MixtureSaved* saved,
                                      const MixtureOptions& options);

// Of the rows of `saved`, which `dy_TH` has alone.
at::Tensor CudaParallelMixtureBackward(const ModelDescription& model, const LayerTensors& weights,
                                       const at::Tensor& dy_TH, const MixtureSaved& saved,
                                       LayerTensors* gradients, const LoadBalanceTerm& balance);

}  // namespace oom
