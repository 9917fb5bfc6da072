#include "runtime/ops/parallel_mixture.h"

#include <cmath>

#include "runtime/ops/dense_mlp.h"
#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"

namespace oom {
namespace {

// u. Rounded after each product, as the published model does.
at::Tensor RouterInput(const ModelDescription& model, const LayerTensors& weights,
                       const at::Tensor& h_TH) {
  return RmsNormForward(h_TH, {}, model.norm)
      .mul_(weights.router_scale)
      .mul_(RouterInputScale(h_TH));
}

// Wide, to be added to dh.
at::Tensor RouterInputBackward(const ModelDescription& model, const LayerTensors& weights,
                               const at::Tensor& du_TH, const at::Tensor& h_TH,
                               LayerTensors* gradients) {
  const at::Tensor dscaled_TH = at::mul(du_TH, RouterInputScale(h_TH));
  gradients->router_scale.add_(
      at::mul(dscaled_TH, Wide(RmsNormForward(h_TH, {}, model.norm))).sum(0));
  return RmsNormBackward(dscaled_TH.mul(Wide(weights.router_scale)), h_TH, {}, model.norm, {});
}

// [T, K], wide.
at::Tensor ScaleOfChosen(const LayerTensors& weights, const RouterSaved& router) {
  return Wide(weights.expert_scale)
      .index_select(0, router.expert_TK.flatten())
      .view(router.expert_TK.sizes());
}

// Wide, as applied in the combine.
at::Tensor ScaledWeights(const LayerTensors& weights, const RouterSaved& router) {
  return at::mul(router.weight_TK, ScaleOfChosen(weights, router));
}

// What the two branches give before their norms, and d + e.
struct Branches {
  at::Tensor dense_TH;
  at::Tensor experts_TH;
  at::Tensor sum_TH;
};

at::Tensor WeightByRow(const LayerTensors& weights, const MixtureSaved& saved) {
  return ScaledWeights(weights, saved.router).flatten().index_select(0, saved.groups.pair_R);
}

Branches RunBranches(const ModelDescription& model, const LayerTensors& weights,
                     const MixtureSaved& saved) {
  Branches branches;
  branches.dense_TH =
      DenseDownForward(saved.shared.gate_up_TF, weights.shared_down, model.activation);
  branches.experts_TH = ExpertsDownForward(
      saved.gate_up_RF, weights.down, WeightByRow(weights, saved), saved.groups, model.activation);
  branches.sum_TH =
      RmsNormForward(branches.dense_TH, weights.shared_output_norm, model.norm)
          .add_(RmsNormForward(branches.experts_TH, weights.experts_output_norm, model.norm));
  return branches;
}

// The gradient of h through the dense branch, of that of its output.
at::Tensor DenseBranchBackward(const ModelDescription& model, const LayerTensors& weights,
                               const at::Tensor& dy_TH, const MixtureSaved& saved,
                               LayerTensors* gradients) {
  const at::Tensor dnormed_TH =
      DenseMlpBackward(dy_TH, RmsNormForward(saved.input_TH, weights.post_norm, model.norm),
                       saved.shared.gate_up_TF, weights.shared_gate_up, weights.shared_down,
                       model.activation, gradients->shared_gate_up, gradients->shared_down);
  return RmsNormBackward(dnormed_TH, saved.input_TH, weights.post_norm, model.norm,
                         gradients->post_norm);
}

// The same through the experts and their router.
at::Tensor ExpertsBranchBackward(const ModelDescription& model, const LayerTensors& weights,
                                 const at::Tensor& dy_TH, const MixtureSaved& saved,
                                 LayerTensors* gradients, const LoadBalanceTerm& balance) {
  const at::Tensor& h_TH = saved.input_TH;
  const ExpertGroups& groups = saved.groups;
  const RouterSaved& router = saved.router;
  ClearUnwrittenExperts(gradients);
  const ExpertsGradients experts = ExpertsBackward(
      {.x_RH =
           RmsNormForward(h_TH, weights.experts_norm, model.norm).index_select(0, groups.token_R),
       .gate_up_RF = saved.gate_up_RF,
       .weight_R = WeightByRow(weights, saved),
       .dy_RH = dy_TH.index_select(0, groups.token_R)},
      weights.gate_up, weights.down, groups.rows_by_expert, model.activation, gradients->gate_up,
      gradients->down);
  const at::Tensor dweight_TK = ByPair(experts.weight_R, groups);
  gradients->expert_scale.index_add_(0, router.expert_TK.flatten(),
                                     at::mul(dweight_TK, router.weight_TK).flatten());
  const at::Tensor du_TH =
      RouterBackward(model, router, at::mul(dweight_TK, ScaleOfChosen(weights, router)), balance,
                     RouterInput(model, weights, h_TH), weights.router, gradients->router);
  return RmsNormBackward(SumTokenRows(experts.x_RH, groups, WideType(dy_TH.scalar_type())), h_TH,
                         weights.experts_norm, model.norm, gradients->experts_norm)
      .add_(RouterInputBackward(model, weights, du_TH, h_TH, gradients));
}

}  // namespace

double RouterInputScale(const at::Tensor& h_TH) {
  return 1.0 / std::sqrt(static_cast<double>(h_TH.size(1)));
}

MixtureSaved ParallelMixtureGateUp(const ModelDescription& model, const LayerTensors& weights,
                                   const at::Tensor& h_TH, TokenRange tokens) {
  MixtureSaved saved;
  saved.tokens = tokens;
  saved.input_TH = RowsOf(h_TH, tokens);
  saved.shared.gate_up_TF = DenseGateUpForward(
      RmsNormForward(saved.input_TH, weights.post_norm, model.norm), weights.shared_gate_up);
  saved.router = RouterForward(model, RouterInput(model, weights, saved.input_TH), weights.router);
  saved.groups = GroupByExpert(saved.router.expert_TK, model.expert_count);
  saved.gate_up_RF =
      ExpertsGateUpForward(RmsNormForward(saved.input_TH, weights.experts_norm, model.norm)
                               .index_select(0, saved.groups.token_R),
                           weights.gate_up, saved.groups.rows_by_expert);
  return saved;
}

at::Tensor ParallelMixtureDown(const ModelDescription& model, const LayerTensors& weights,
                               const MixtureSaved& saved) {
  return RmsNormForward(RunBranches(model, weights, saved).sum_TH, weights.mixture_output_norm,
                        model.norm)
      .add_(saved.input_TH)
      .mul_(weights.layer_scale);
}

at::Tensor ParallelMixtureBackward(const ModelDescription& model, const LayerTensors& weights,
                                   const at::Tensor& dy_TH, const MixtureSaved& saved,
                                   LayerTensors* gradients, const LoadBalanceTerm& balance) {
  const at::ScalarType type = dy_TH.scalar_type();
  const Branches branches = RunBranches(model, weights, saved);
  const at::Tensor dresidual_TH = at::mul(dy_TH, weights.layer_scale);
  const at::Tensor dsum_TH =
      RmsNormBackward(dresidual_TH, branches.sum_TH, weights.mixture_output_norm, model.norm,
                      gradients->mixture_output_norm);
  const at::Tensor ddense_TH =
      RmsNormBackward(dsum_TH, branches.dense_TH, weights.shared_output_norm, model.norm,
                      gradients->shared_output_norm)
          .to(type);
  const at::Tensor dexperts_TH =
      RmsNormBackward(dsum_TH, branches.experts_TH, weights.experts_output_norm, model.norm,
                      gradients->experts_output_norm)
          .to(type);
  at::Tensor dh_TH = DenseBranchBackward(model, weights, ddense_TH, saved, gradients);
  dh_TH.add_(ExpertsBranchBackward(model, weights, dexperts_TH, saved, gradients, balance));
  return AddResidual(dresidual_TH, dh_TH);
}

}  // namespace oom
