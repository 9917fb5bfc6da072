// The parts of a routed mixture on the GPU: routing, rows by expert, the experts, and their
// backward. Formulas and shapes as in runtime/ops/router.h and experts.h.

#pragma once

#include "runtime/ops/layer.h"

namespace oom {

// Fills saved->router and saved->groups; adds to `stats` if it is not null.
void CudaRoute(const ModelDescription& model, const at::Tensor& normed_TH,
               const at::Tensor& router_EH, MixtureSaved* saved, RouterStats* stats);

at::Tensor CudaExpertsGateUp(const at::Tensor& normed_TH, const at::Tensor& gate_up_EFH,
                             const ExpertGroups& groups);

// residual + each token's weighted sum of its experts' outputs.
at::Tensor CudaExpertsDown(const ModelDescription& model, const MixtureSaved& saved,
                           const at::Tensor& down_EHI, const at::Tensor& residual_TH);

// The gradient of the normed rows through experts and router, wide. Temporaries of R rows and H
// columns follow one another: there is one at a time.
at::Tensor CudaRoutedBackward(const ModelDescription& model, const LayerTensors& weights,
                              const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                              const MixtureSaved& saved, const LoadBalanceTerm& balance,
                              LayerTensors* gradients);

}  // namespace oom
