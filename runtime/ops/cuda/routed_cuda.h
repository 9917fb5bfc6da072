// The parts of a routed mixture on the GPU: routing, rows by expert, the experts, and their
// backward. Formulas and shapes as in runtime/ops/router.h and experts.h.

#pragma once

#include "runtime/ops/layer.h"

namespace oom {

// Fills saved->router and saved->groups; adds to `stats` if it is not null.
void CudaRoute(const ModelDescription& model, const at::Tensor& normed_TH,
               const at::Tensor& router_EH, MixtureSaved* saved, RouterStats* stats);

// What each row's (token, choice) pair has; FP32.
at::Tensor CudaByRow(const at::Tensor& value_TK, const ExpertGroups& groups);

// By row, what the combine multiplies by where experts have no scale of their own (router.h); FP32.
at::Tensor CudaCombineWeights(const ModelDescription& model, const MixtureSaved& saved);

at::Tensor CudaExpertsGateUp(const at::Tensor& normed_TH, const at::Tensor& gate_up_EFH,
                             const ExpertGroups& groups);

// residual, which may be undefined, + each token's sum of its experts' outputs, weighted by
// `weight_R`.
at::Tensor CudaExpertsDown(const ModelDescription& model, const MixtureSaved& saved,
                           const at::Tensor& down_EHI, const at::Tensor& weight_R,
                           const at::Tensor& residual_TH);

// The experts' part of the gradient of the normed rows, wide; `dweight_R` receives the gradient of
// `weight_R`. Temporaries of R rows and H columns follow one another: there is one at a time.
at::Tensor CudaExpertsBackward(const ModelDescription& model, const LayerTensors& weights,
                               const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                               const MixtureSaved& saved, const at::Tensor& weight_R,
                               LayerTensors* gradients, at::Tensor* dweight_R);

// The router's logits' gradient, BF16; `dweight_R` is that of the router's weights, by row.
at::Tensor CudaLogitsGradient(const ModelDescription& model, const MixtureSaved& saved,
                              const at::Tensor& dweight_R, const LoadBalanceTerm& balance);

// The gradient of the normed rows through experts and router, wide, where experts have no scale.
at::Tensor CudaRoutedBackward(const ModelDescription& model, const LayerTensors& weights,
                              const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                              const MixtureSaved& saved, const LoadBalanceTerm& balance,
                              LayerTensors* gradients);

}  // namespace oom
