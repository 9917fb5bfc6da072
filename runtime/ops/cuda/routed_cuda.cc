#include "runtime/ops/cuda/routed_cuda.h"

#include <utility>

#include "runtime/kernels/expert_groups.h"
#include "runtime/kernels/grouped_product.h"
#include "runtime/kernels/grouped_weight_gradient.h"
#include "runtime/kernels/router.h"
#include "runtime/kernels/swiglu.h"
#include "runtime/kernels/token_rows.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/cuda/dense_mlp_cuda.h"
#include "runtime/ops/precision.h"

namespace oom {
namespace {

RouterShape ShapeOfRouter(const ModelDescription& model, int64_t tokens) {
  return {.token_count = tokens,
          .expert_count = static_cast<int>(model.expert_count),
          .experts_per_token = static_cast<int>(model.experts_per_token),
          .renormalize = model.renormalize_top_k};
}

// By expert, the row after its last: what grouped products take.
at::Tensor RowEnds(const ExpertGroups& groups) {
  return groups.first_row_E1.narrow(0, 1, groups.first_row_E1.size(0) - 1);
}

// y = x @ w[e] for each expert's rows, or transposed x @ w[e].T: on Hopper by our own kernel, which
// is 10 to 25% faster there.
at::Tensor ExpertProduct(const at::Tensor& x, const at::Tensor& w, bool transposed,
                         const ExpertGroups& groups) {
  if (!HasHopperTensorCores() || w.size(0) > kGroupedProductExpertsMax) {
    return at::_grouped_mm(x, transposed ? w.transpose(1, 2) : w, RowEnds(groups));
  }
  const int64_t width = w.size(transposed ? 1 : 2);
  at::Tensor y = at::empty({x.size(0), width}, x.options());
  GroupedProduct({.rows = x.size(0),
                  .expert_count = w.size(0),
                  .x_width = x.size(1),
                  .y_width = width,
                  .transposed = transposed},
                 DeviceData<__nv_bfloat16>(x), DeviceData<__nv_bfloat16>(w),
                 DeviceData<int32_t>(RowEnds(groups)), DeviceData<__nv_bfloat16>(y),
                 OperatorStream());
  return y;
}

TokenRows RowsOfTokens(const ExpertGroups& groups, int64_t hidden_size) {
  return {.rows_TK = DeviceData<int32_t>(groups.rows_TK),
          .token_count = groups.rows_TK.size(0),
          .rows_per_token = groups.rows_TK.size(1),
          .hidden_size = hidden_size};
}

at::Tensor Spread(const at::Tensor& x_TH, const ExpertGroups& groups) {
  at::Tensor x_RH = at::empty({groups.pair_R.size(0), x_TH.size(1)}, x_TH.options());
  SpreadRows(RowsOfTokens(groups, x_TH.size(1)), DeviceData<__nv_bfloat16>(x_TH),
             DeviceData<__nv_bfloat16>(x_RH), OperatorStream());
  return x_RH;
}

ExpertGroups Group(const ModelDescription& model, const at::Tensor& expert_TK) {
  const int64_t tokens = expert_TK.size(0);
  const int64_t rows = tokens * model.experts_per_token;
  ExpertGroups groups;
  groups.first_row_E1 = at::empty({model.expert_count + 1}, expert_TK.options());
  groups.pair_R = at::empty({rows}, expert_TK.options());
  groups.token_R = at::empty({rows}, expert_TK.options());
  groups.rows_TK = at::empty_like(expert_TK);
  const ExpertGroupShape shape{.token_count = tokens,
                               .expert_count = static_cast<int>(model.expert_count),
                               .experts_per_token = static_cast<int>(model.experts_per_token)};
  const at::Tensor scratch = ScratchBytes(ExpertGroupScratchBytes(shape), expert_TK);
  GroupRowsByExpert(shape, DeviceData<int32_t>(expert_TK),
                    {.first_row_E1 = DeviceData<int32_t>(groups.first_row_E1),
                     .pair_R = DeviceData<int32_t>(groups.pair_R),
                     .token_R = DeviceData<int32_t>(groups.token_R),
                     .rows_TK = DeviceData<int32_t>(groups.rows_TK)},
                    scratch.data_ptr(), OperatorStream());
  return groups;
}

void Count(const RouterShape& shape, const at::Tensor& probability_BE, const ExpertGroups& groups,
           RouterStats* stats) {
  if (!stats->count_E.defined()) {
    const at::TensorOptions options = probability_BE.options();
    stats->count_E = at::zeros({probability_BE.size(1)}, options.dtype(at::kLong));
    stats->probability_E = at::zeros({probability_BE.size(1)}, options);
  }
  AddRouterStats(shape, DeviceData<double>(probability_BE),
                 DeviceData<int32_t>(groups.first_row_E1), DeviceData<int64_t>(stats->count_E),
                 DeviceData<double>(stats->probability_E), OperatorStream());
  stats->tokens += shape.token_count;
}

// gradient[e] = or += dy.T @ x over each expert's rows.
void ExpertsWeightGradient(const at::Tensor& gradient, bool add, const at::Tensor& dy,
                           const at::Tensor& x, const ExpertGroups& groups) {
  OOM_CHECK(gradient.stride(2) == 1);
  GroupedWeightGradient({.rows = dy.size(0),
                         .expert_count = gradient.size(0),
                         .x_width = dy.size(1),
                         .y_width = x.size(1),
                         .d_row_stride = gradient.stride(1),
                         .d_expert_stride = gradient.stride(0)},
                        {.accumulate = add, .hopper = HasHopperTensorCores()},
                        DeviceData<__nv_bfloat16>(dy), DeviceData<__nv_bfloat16>(x),
                        DeviceData<int32_t>(RowEnds(groups)), DeviceData<float>(gradient),
                        OperatorStream());
}

// What leaves the experts' SwiGLU backward.
struct ActivationGradients {
  at::Tensor dgate_up_RF;
  at::Tensor weighted_RI;
  at::Tensor dweight_R;
};

// `da_RI`'s memory becomes weighted_RI.
ActivationGradients ActivationBackward(const at::Tensor& da_RI, const at::Tensor& gate_up_RF,
                                       const at::Tensor& weight_R, Activation activation) {
  ActivationGradients result;
  result.dgate_up_RF = at::empty_like(gate_up_RF);
  result.weighted_RI = da_RI;
  result.dweight_R = at::empty_like(weight_R);
  SwigluBackward({.rows = da_RI.size(0), .width = da_RI.size(1), .activation = activation},
                 SwigluBackwardArguments<__nv_bfloat16>{
                     .da_RI = DeviceData<__nv_bfloat16>(da_RI),
                     .gate_up_RF = DeviceData<__nv_bfloat16>(gate_up_RF),
                     .weight_R = DeviceData<float>(weight_R),
                     .dgate_up_RF = DeviceData<__nv_bfloat16>(result.dgate_up_RF),
                     .weighted_RI = DeviceData<__nv_bfloat16>(result.weighted_RI),
                     .dweight_R = DeviceData<float>(result.dweight_R)},
                 OperatorStream());
  return result;
}

}  // namespace

void CudaRoute(const ModelDescription& model, const at::Tensor& normed_TH,
               const at::Tensor& router_EH, MixtureSaved* saved, RouterStats* stats) {
  const RouterShape shape = ShapeOfRouter(model, normed_TH.size(0));
  const at::TensorOptions options = normed_TH.options();
  RouterSaved& router = saved->router;
  router.logits_TE = at::linear(normed_TH, router_EH);
  router.expert_TK =
      at::empty({shape.token_count, model.experts_per_token}, options.dtype(at::kInt));
  router.weight_TK = at::empty(router.expert_TK.sizes(), options.dtype(at::kFloat));
  at::Tensor probability_BE;
  if (stats != nullptr) {
    probability_BE =
        at::empty({RouterBlocks(shape), model.expert_count}, options.dtype(at::kDouble));
  }
  RouterForward(shape, DeviceData<__nv_bfloat16>(router.logits_TE),
                {.expert_TK = DeviceData<int32_t>(router.expert_TK),
                 .weight_TK = DeviceData<float>(router.weight_TK),
                 .probability_BE = DeviceData<double>(probability_BE)},
                OperatorStream());
  saved->groups = Group(model, router.expert_TK);
  if (stats != nullptr) Count(shape, probability_BE, saved->groups, stats);
}

at::Tensor CudaByRow(const at::Tensor& value_TK, const ExpertGroups& groups) {
  at::Tensor value_R = at::empty(groups.pair_R.sizes(), value_TK.options());
  PairsToRows(DeviceData<int32_t>(groups.pair_R), value_R.size(0), DeviceData<float>(value_TK),
              DeviceData<float>(value_R), OperatorStream());
  return value_R;
}

at::Tensor CudaCombineWeights(const ModelDescription& model, const MixtureSaved& saved) {
  return CudaByRow(Wide(CombineWeights(model, saved.router)), saved.groups);
}

at::Tensor CudaExpertsGateUp(const at::Tensor& normed_TH, const at::Tensor& gate_up_EFH,
                             const ExpertGroups& groups) {
  return ExpertProduct(Spread(normed_TH, groups), gate_up_EFH, /*transposed=*/true, groups);
}

at::Tensor CudaExpertsDown(const ModelDescription& model, const MixtureSaved& saved,
                           const at::Tensor& down_EHI, const at::Tensor& weight_R,
                           const at::Tensor& residual_TH) {
  const at::Tensor y_RH = ExpertProduct(CudaActivated(saved.gate_up_RF, model.activation), down_EHI,
                                        /*transposed=*/true, saved.groups);
  at::Tensor y_TH = at::empty_like(saved.input_TH);
  CombineRows(RowsOfTokens(saved.groups, y_TH.size(1)), DeviceData<__nv_bfloat16>(y_RH),
              DeviceData<float>(weight_R), DeviceData<__nv_bfloat16>(residual_TH),
              DeviceData<__nv_bfloat16>(y_TH), OperatorStream());
  return y_TH;
}

at::Tensor CudaExpertsBackward(const ModelDescription& model, const LayerTensors& weights,
                               const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                               const MixtureSaved& saved, const at::Tensor& weight_R,
                               LayerTensors* gradients, at::Tensor* dweight_R) {
  const ExpertGroups& groups = saved.groups;
  const bool add = !std::exchange(gradients->experts_unwritten, false);
  ActivationGradients activation;
  {
    const at::Tensor dy_RH = Spread(dy_TH, groups);
    activation =
        ActivationBackward(ExpertProduct(dy_RH, weights.down, /*transposed=*/false, groups),
                           saved.gate_up_RF, weight_R, model.activation);
    ExpertsWeightGradient(gradients->down, add, dy_RH, activation.weighted_RI, groups);
    activation.weighted_RI.reset();
  }
  ExpertsWeightGradient(gradients->gate_up, add, activation.dgate_up_RF, Spread(normed_TH, groups),
                        groups);
  const at::Tensor dx_RH = ExpertProduct(activation.dgate_up_RF, weights.gate_up, false, groups);
  activation.dgate_up_RF.reset();
  *dweight_R = activation.dweight_R;

  at::Tensor dx_TH = at::empty(dy_TH.sizes(), dy_TH.options().dtype(at::kFloat));
  SumTokenRows(RowsOfTokens(groups, dy_TH.size(1)), DeviceData<__nv_bfloat16>(dx_RH),
               DeviceData<float>(dx_TH), OperatorStream());
  return dx_TH;
}

at::Tensor CudaLogitsGradient(const ModelDescription& model, const MixtureSaved& saved,
                              const at::Tensor& dweight_R, const LoadBalanceTerm& balance) {
  const RouterSaved& router = saved.router;
  const at::Tensor dweight_TK = at::empty_like(router.weight_TK);
  RowsToPairs(DeviceData<int32_t>(saved.groups.pair_R), dweight_R.size(0),
              DeviceData<float>(dweight_R), DeviceData<float>(dweight_TK), OperatorStream());
  at::Tensor fraction_E;
  double scale = 0.0;
  if (balance.coefficient != 0.0) {
    fraction_E = balance.fraction_E.to(at::kFloat);
    scale = balance.coefficient * static_cast<double>(model.expert_count) /
            static_cast<double>(balance.tokens);
  }
  at::Tensor dlogits_TE = at::empty_like(router.logits_TE);
  RouterBackward(ShapeOfRouter(model, router.logits_TE.size(0)),
                 DeviceData<__nv_bfloat16>(router.logits_TE),
                 {.expert_TK = DeviceData<int32_t>(router.expert_TK),
                  .weight_TK = DeviceData<float>(router.weight_TK),
                  .dweight_TK = DeviceData<float>(dweight_TK),
                  .balance = {.fraction_E = DeviceData<float>(fraction_E), .scale = scale}},
                 DeviceData<__nv_bfloat16>(dlogits_TE), OperatorStream());
  return dlogits_TE;
}

at::Tensor CudaRoutedBackward(const ModelDescription& model, const LayerTensors& weights,
                              const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                              const MixtureSaved& saved, const LoadBalanceTerm& balance,
                              LayerTensors* gradients) {
  at::Tensor dweight_R;
  at::Tensor dnormed_TH =
      CudaExpertsBackward(model, weights, dy_TH, normed_TH, saved, CudaCombineWeights(model, saved),
                          gradients, &dweight_R);
  const at::Tensor dlogits_TE = CudaLogitsGradient(model, saved, dweight_R, balance);
  AddWeightGradient(gradients->router, dlogits_TE, normed_TH);
  AddWideProduct(dnormed_TH, dlogits_TE, weights.router);
  return dnormed_TH;
}

}  // namespace oom
