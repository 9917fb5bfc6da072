// Formulas and shapes as in runtime/ops/mixture.cc.

#include "runtime/ops/cuda/mixture_cuda.h"

#include "runtime/kernels/swiglu.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/cuda/routed_cuda.h"

namespace oom {
namespace {

at::Tensor Rows(const at::Tensor& x_TH, TokenRange tokens) {
  return tokens.count < 0 ? x_TH : x_TH.narrow(0, tokens.first, tokens.count);
}

at::Tensor DenseDown(const at::Tensor& gate_up_TF, const at::Tensor& down_HI,
                     const at::Tensor& residual_TH) {
  const at::Tensor a_TI =
      at::empty({gate_up_TF.size(0), gate_up_TF.size(1) / 2}, gate_up_TF.options());
  SwigluForward({.rows = a_TI.size(0), .width = a_TI.size(1)},
                DeviceData<__nv_bfloat16>(gate_up_TF), DeviceData<__nv_bfloat16>(a_TI),
                OperatorStream());
  return at::addmm(residual_TH, a_TI, down_HI.t());
}

// dn, wide.
at::Tensor DenseBackward(const LayerTensors& weights, const at::Tensor& dy_TH,
                         const at::Tensor& normed_TH, const at::Tensor& gate_up_TF,
                         LayerTensors* gradients) {
  // Becomes the activation itself.
  at::Tensor da_TI = at::mm(dy_TH, weights.down);
  const at::Tensor dgate_up_TF = at::empty_like(gate_up_TF);
  SwigluBackward(
      {.rows = da_TI.size(0), .width = da_TI.size(1)},
      SwigluBackwardArguments<__nv_bfloat16>{.da_RI = DeviceData<__nv_bfloat16>(da_TI),
                                             .gate_up_RF = DeviceData<__nv_bfloat16>(gate_up_TF),
                                             .dgate_up_RF = DeviceData<__nv_bfloat16>(dgate_up_TF),
                                             .weighted_RI = DeviceData<__nv_bfloat16>(da_TI)},
      OperatorStream());
  AddWeightGradient(gradients->down, dy_TH, da_TI);
  da_TI.reset();
  AddWeightGradient(gradients->gate_up, dgate_up_TF, normed_TH);
  return at::mm(dgate_up_TF, weights.gate_up, at::kFloat);
}

}  // namespace

at::Tensor CudaMixtureForward(const ModelDescription& model, const LayerDescription& layer,
                              const LayerTensors& weights, const at::Tensor& h_TH,
                              MixtureSaved* saved, const MixtureOptions& options) {
  const bool routed = HasExperts(layer.mixture);
  MixtureSaved kept;
  kept.tokens = options.tokens;
  kept.input_TH = Rows(h_TH, options.tokens);
  {
    const at::Tensor normed_TH = NormForward(kept.input_TH, weights.post_norm, model.norm);
    if (routed) {
      CudaRoute(model, normed_TH, weights.router, &kept, options.stats);
      kept.gate_up_RF = CudaExpertsGateUp(normed_TH, weights.gate_up, kept.groups);
    } else {
      kept.gate_up_RF = at::linear(normed_TH, weights.gate_up);
    }
  }
  at::Tensor y_TH;
  if (!options.stop_at_gate_up) {
    y_TH = routed ? CudaExpertsDown(model, kept, weights.down, kept.input_TH)
                  : DenseDown(kept.gate_up_RF, weights.down, kept.input_TH);
  }
  if (saved != nullptr) *saved = std::move(kept);
  return y_TH;
}

at::Tensor CudaMixtureBackward(const ModelDescription& model, const LayerDescription& layer,
                               const LayerTensors& weights, const at::Tensor& dy_TH,
                               const MixtureSaved& saved, LayerTensors* gradients,
                               const LoadBalanceTerm& balance) {
  const at::Tensor dy_rows = Rows(dy_TH, saved.tokens);
  at::Tensor normed_TH = NormForward(saved.input_TH, weights.post_norm, model.norm);
  const at::Tensor dnormed_TH =
      layer.mixture == MixtureKind::kDense
          ? DenseBackward(weights, dy_rows, normed_TH, saved.gate_up_RF, gradients)
          : CudaRoutedBackward(model, weights, dy_rows, normed_TH, saved, balance, gradients);
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
