// Formulas and shapes as in runtime/ops/mixture.cc.

#include "runtime/ops/cuda/mixture_cuda.h"

#include "runtime/kernels/token_gate.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/cuda/dense_mlp_cuda.h"
#include "runtime/ops/cuda/parallel_mixture_cuda.h"
#include "runtime/ops/cuda/routed_cuda.h"

namespace oom {
namespace {

// residual + logistic(z) f of the expert that all tokens have.
at::Tensor SharedDown(const ModelDescription& model, const LayerTensors& weights,
                      const SharedExpertSaved& saved, const at::Tensor& residual_TH) {
  const at::Tensor y_TH = CudaDenseDown(saved.gate_up_TF, weights.shared_down, model.activation);
  TokenGateForward({.tokens = y_TH.size(0), .width = y_TH.size(1)},
                   {.f_TH = DeviceData<__nv_bfloat16>(y_TH),
                    .logit_T = DeviceData<__nv_bfloat16>(saved.logit_T1),
                    .residual_TH = DeviceData<__nv_bfloat16>(residual_TH),
                    .y_TH = DeviceData<__nv_bfloat16>(y_TH)},
                   OperatorStream());
  return y_TH;
}

// Adds to the gradient of the normed rows.
void AddSharedBackward(const ModelDescription& model, const LayerTensors& weights,
                       const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                       const SharedExpertSaved& saved, LayerTensors* gradients,
                       const at::Tensor& dnormed_TH) {
  const at::Tensor dlogit_T1 = at::empty_like(saved.logit_T1);
  at::Tensor df_TH = CudaDenseDown(saved.gate_up_TF, weights.shared_down, model.activation);
  TokenGateBackward({.tokens = df_TH.size(0), .width = df_TH.size(1)},
                    {.dy_TH = DeviceData<__nv_bfloat16>(dy_TH),
                     .f_TH = DeviceData<__nv_bfloat16>(df_TH),
                     .logit_T = DeviceData<__nv_bfloat16>(saved.logit_T1),
                     .df_TH = DeviceData<__nv_bfloat16>(df_TH),
                     .dlogit_T = DeviceData<__nv_bfloat16>(dlogit_T1)},
                    OperatorStream());
  const at::Tensor dgate_up_TF = CudaMlpBackward(
      {weights.shared_gate_up, weights.shared_down}, df_TH, normed_TH, saved.gate_up_TF,
      model.activation, {gradients->shared_gate_up, gradients->shared_down});
  df_TH.reset();
  AddWeightGradient(gradients->shared_gate, dlogit_T1, normed_TH);
  AddWideProduct(dnormed_TH, dgate_up_TF, weights.shared_gate_up);
  AddWideProduct(dnormed_TH, dlogit_T1, weights.shared_gate);
}

// The gradient of the normed rows, wide.
at::Tensor BranchesBackward(const ModelDescription& model, const LayerDescription& layer,
                            const LayerTensors& weights, const at::Tensor& dy_TH,
                            const at::Tensor& normed_TH, const MixtureSaved& saved,
                            const LoadBalanceTerm& balance, LayerTensors* gradients) {
  if (!HasExperts(layer.mixture)) {
    const at::Tensor dgate_up_TF =
        CudaMlpBackward({weights.gate_up, weights.down}, dy_TH, normed_TH, saved.gate_up_RF,
                        model.activation, {gradients->gate_up, gradients->down});
    return at::mm(dgate_up_TF, weights.gate_up, at::kFloat);
  }
  at::Tensor dnormed_TH =
      CudaRoutedBackward(model, weights, dy_TH, normed_TH, saved, balance, gradients);
  if (layer.mixture == MixtureKind::kRoutedAndShared) {
    AddSharedBackward(model, weights, dy_TH, normed_TH, saved.shared, gradients, dnormed_TH);
  }
  return dnormed_TH;
}

}  // namespace

at::Tensor CudaMixtureForward(const ModelDescription& model, const LayerDescription& layer,
                              const LayerTensors& weights, const at::Tensor& h_TH,
                              MixtureSaved* saved, const MixtureOptions& options) {
  if (layer.mixture == MixtureKind::kRoutedAndDense) {
    return CudaParallelMixtureForward(model, weights, h_TH, saved, options);
  }
  const bool routed = HasExperts(layer.mixture);
  const bool shared = layer.mixture == MixtureKind::kRoutedAndShared;
  MixtureSaved kept;
  kept.tokens = options.tokens;
  kept.input_TH = RowsOf(h_TH, options.tokens);
  {
    const at::Tensor normed_TH = NormForward(kept.input_TH, weights.post_norm, model.norm);
    if (routed) {
      CudaRoute(model, normed_TH, weights.router, &kept, options.stats);
      kept.gate_up_RF = CudaExpertsGateUp(normed_TH, weights.gate_up, kept.groups);
      if (shared) {
        kept.shared = {.gate_up_TF = at::linear(normed_TH, weights.shared_gate_up),
                       .logit_T1 = at::linear(normed_TH, weights.shared_gate)};
      }
    } else {
      kept.gate_up_RF = at::linear(normed_TH, weights.gate_up);
    }
  }
  at::Tensor y_TH;
  if (!options.stop_at_gate_up && routed) {
    y_TH = CudaExpertsDown(
        model, kept, weights.down, CudaCombineWeights(model, kept),
        shared ? SharedDown(model, weights, kept.shared, kept.input_TH) : kept.input_TH);
  } else if (!options.stop_at_gate_up) {
    y_TH = at::addmm(kept.input_TH, CudaActivated(kept.gate_up_RF, model.activation),
                     weights.down.t());
  }
  if (saved != nullptr) *saved = std::move(kept);
  return y_TH;
}

at::Tensor CudaMixtureBackward(const ModelDescription& model, const LayerDescription& layer,
                               const LayerTensors& weights, const at::Tensor& dy_TH,
                               const MixtureSaved& saved, LayerTensors* gradients,
                               const LoadBalanceTerm& balance) {
  const at::Tensor dy_rows = RowsOf(dy_TH, saved.tokens);
  if (layer.mixture == MixtureKind::kRoutedAndDense) {
    return CudaParallelMixtureBackward(model, weights, dy_rows, saved, gradients, balance);
  }
  at::Tensor normed_TH = NormForward(saved.input_TH, weights.post_norm, model.norm);
  const at::Tensor dnormed_TH =
      BranchesBackward(model, layer, weights, dy_rows, normed_TH, saved, balance, gradients);
  normed_TH.reset();
  at::Tensor dh_TH = at::empty_like(dy_rows);
  NormBackward({.dy_RH = dnormed_TH,
                .x_RH = saved.input_TH,
                .weight_H = weights.post_norm,
                .rule = model.norm,
                .residual_gradient_RH = dy_rows,
                .dweight_H = gradients->post_norm},
               dh_TH);
  return dh_TH;
}

}  // namespace oom
