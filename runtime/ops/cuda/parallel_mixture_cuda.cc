// Formulas and shapes as in runtime/ops/parallel_mixture.h.

#include "runtime/ops/cuda/parallel_mixture_cuda.h"

#include <utility>

#include "runtime/kernels/expert_groups.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/cuda/dense_mlp_cuda.h"
#include "runtime/ops/cuda/routed_cuda.h"
#include "runtime/ops/parallel_mixture.h"
#include "runtime/ops/precision.h"

namespace oom {
namespace {

// u: the norm is rounded before it meets the scale, and so are both products.
at::Tensor RouterInput(const ModelDescription& model, const LayerTensors& weights,
                       const at::Tensor& h_TH) {
  const NormRule rule = {.epsilon = model.norm.epsilon, .scale = NormScale::kWeightAfterRounding};
  return NormForward(
      h_TH, weights.router_scale, rule,
      {.factor = at::full({1}, RouterInputScale(h_TH), h_TH.options().dtype(at::kFloat))});
}

// By expert row, FP32: wn, and its expert's scale.
struct RowWeights {
  RowWeights(const LayerTensors& weights, const MixtureSaved& saved)
      : weight_R(CudaByRow(saved.router.weight_TK, saved.groups)),
        scale_R(CudaByRow(Wide(weights.expert_scale)
                              .index_select(0, saved.router.expert_TK.flatten())
                              .view(saved.router.expert_TK.sizes()),
                          saved.groups)) {}
  // w, as the combine applies it.
  at::Tensor applied() const { return at::mul(weight_R, scale_R); }

  at::Tensor weight_R;
  at::Tensor scale_R;
};

// What the two branches give before their norms, and d + e.
struct Branches {
  at::Tensor dense_TH;
  at::Tensor experts_TH;
  at::Tensor sum_TH;
};

Branches RunBranches(const ModelDescription& model, const LayerTensors& weights,
                     const MixtureSaved& saved, const at::Tensor& applied_R) {
  Branches branches;
  branches.experts_TH =
      CudaExpertsDown(model, saved, weights.down, applied_R, /*residual_TH=*/at::Tensor());
  branches.dense_TH = CudaDenseDown(saved.shared.gate_up_TF, weights.shared_down, model.activation);
  branches.sum_TH = NormForward(
      branches.experts_TH, weights.experts_output_norm, model.norm,
      {.addend_RH = NormForward(branches.dense_TH, weights.shared_output_norm, model.norm)});
  return branches;
}

// The branches' gradients in place of what they gave, of `dy_TH`, that of h + norm(d + e).
void OutputNormsBackward(const ModelDescription& model, const LayerTensors& weights,
                         const at::Tensor& dy_TH, Branches* branches, LayerTensors* gradients) {
  const at::Tensor dsum_TH = at::empty(dy_TH.sizes(), dy_TH.options().dtype(at::kFloat));
  NormBackward({.dy_RH = dy_TH,
                .x_RH = branches->sum_TH,
                .weight_H = weights.mixture_output_norm,
                .rule = model.norm,
                .dweight_H = gradients->mixture_output_norm},
               dsum_TH);
  branches->sum_TH.reset();
  NormBackward({.dy_RH = dsum_TH,
                .x_RH = branches->dense_TH,
                .weight_H = weights.shared_output_norm,
                .rule = model.norm,
                .dweight_H = gradients->shared_output_norm},
               branches->dense_TH);
  NormBackward({.dy_RH = dsum_TH,
                .x_RH = branches->experts_TH,
                .weight_H = weights.experts_output_norm,
                .rule = model.norm,
                .dweight_H = gradients->experts_output_norm},
               branches->experts_TH);
}

// The experts' part of dh and `residual_TH`, wide; `dweight_R` receives the gradient of wn.
at::Tensor ExpertsBackward(const ModelDescription& model, const LayerTensors& weights,
                           const at::Tensor& dy_TH, const at::Tensor& residual_TH,
                           const MixtureSaved& saved, const RowWeights& rows,
                           LayerTensors* gradients, at::Tensor* dweight_R) {
  at::Tensor dh_TH = CudaExpertsBackward(
      model, weights, dy_TH, NormForward(saved.input_TH, weights.experts_norm, model.norm), saved,
      rows.applied(), gradients, dweight_R);
  NormBackward({.dy_RH = dh_TH,
                .x_RH = saved.input_TH,
                .weight_H = weights.experts_norm,
                .rule = model.norm,
                .residual_gradient_RH = residual_TH,
                .dweight_H = gradients->experts_norm},
               dh_TH);
  AddProductsByExpert(DeviceData<int32_t>(saved.groups.first_row_E1),
                      static_cast<int>(model.expert_count), DeviceData<float>(*dweight_R),
                      DeviceData<float>(rows.weight_R), DeviceData<float>(gradients->expert_scale),
                      OperatorStream());
  dweight_R->mul_(rows.scale_R);
  return dh_TH;
}

// Adds the router's part to `dh_TH`.
void AddRouterBackward(const ModelDescription& model, const LayerTensors& weights,
                       const MixtureSaved& saved, const at::Tensor& dweight_R,
                       const LoadBalanceTerm& balance, LayerTensors* gradients,
                       const at::Tensor& dh_TH) {
  const at::Tensor dlogits_TE = CudaLogitsGradient(model, saved, dweight_R, balance);
  AddWeightGradient(gradients->router, dlogits_TE, RouterInput(model, weights, saved.input_TH));
  // du H^(-1/2): in backward nothing is rounded between the norm and its factors.
  at::Tensor dscaled_TH = at::empty_like(dh_TH);
  at::addmm_out(dscaled_TH, dscaled_TH, dlogits_TE, weights.router, at::kFloat, /*beta=*/0,
                /*alpha=*/RouterInputScale(dh_TH));
  NormBackward({.dy_RH = dscaled_TH,
                .x_RH = saved.input_TH,
                .weight_H = weights.router_scale,
                .rule = {.epsilon = model.norm.epsilon, .scale = NormScale::kWeight},
                .residual_gradient_RH = dh_TH,
                .dweight_H = gradients->router_scale},
               dh_TH);
}

// dh: the dense MLP's part and `residual_TH`.
at::Tensor DenseBackward(const ModelDescription& model, const LayerTensors& weights,
                         const at::Tensor& dy_TH, const at::Tensor& residual_TH,
                         const MixtureSaved& saved, LayerTensors* gradients) {
  at::Tensor dgate_up_TF = CudaMlpBackward(
      {weights.shared_gate_up, weights.shared_down}, dy_TH,
      NormForward(saved.input_TH, weights.post_norm, model.norm), saved.shared.gate_up_TF,
      model.activation, {gradients->shared_gate_up, gradients->shared_down});
  const at::Tensor dnormed_TH = at::mm(dgate_up_TF, weights.shared_gate_up, at::kFloat);
  dgate_up_TF.reset();
  at::Tensor dh_TH = at::empty_like(dy_TH);
  NormBackward({.dy_RH = dnormed_TH,
                .x_RH = saved.input_TH,
                .weight_H = weights.post_norm,
                .rule = model.norm,
                .residual_gradient_RH = residual_TH,
                .dweight_H = gradients->post_norm},
               dh_TH);
  return dh_TH;
}

}  // namespace

at::Tensor CudaParallelMixtureForward(const ModelDescription& model, const LayerTensors& weights,
                                      const at::Tensor& h_TH, MixtureSaved* saved,
                                      const MixtureOptions& options) {
  MixtureSaved kept;
  kept.tokens = options.tokens;
  kept.input_TH = RowsOf(h_TH, options.tokens);
  kept.shared.gate_up_TF =
      at::linear(NormForward(kept.input_TH, weights.post_norm, model.norm), weights.shared_gate_up);
  CudaRoute(model, RouterInput(model, weights, kept.input_TH), weights.router, &kept,
            options.stats);
  kept.gate_up_RF = CudaExpertsGateUp(NormForward(kept.input_TH, weights.experts_norm, model.norm),
                                      weights.gate_up, kept.groups);
  at::Tensor y_TH;
  if (!options.stop_at_gate_up) {
    const Branches branches =
        RunBranches(model, weights, kept, RowWeights(weights, kept).applied());
    y_TH = NormForward(branches.sum_TH, weights.mixture_output_norm, model.norm,
                       {.addend_RH = kept.input_TH, .factor = Wide(weights.layer_scale)});
  }
  if (saved != nullptr) *saved = std::move(kept);
  return y_TH;
}

at::Tensor CudaParallelMixtureBackward(const ModelDescription& model, const LayerTensors& weights,
                                       const at::Tensor& dy_TH, const MixtureSaved& saved,
                                       LayerTensors* gradients, const LoadBalanceTerm& balance) {
  const RowWeights rows(weights, saved);
  Branches branches = RunBranches(model, weights, saved, rows.applied());
  at::Tensor dresidual_TH = at::mul(dy_TH, weights.layer_scale);
  OutputNormsBackward(model, weights, dresidual_TH, &branches, gradients);

  at::Tensor dweight_R;
  const at::Tensor dh_TH = ExpertsBackward(model, weights, branches.experts_TH, dresidual_TH, saved,
                                           rows, gradients, &dweight_R);
  branches.experts_TH.reset();
  dresidual_TH.reset();
  AddRouterBackward(model, weights, saved, dweight_R, balance, gradients, dh_TH);
  return DenseBackward(model, weights, branches.dense_TH, dh_TH, saved, gradients);
}

}  // namespace oom
