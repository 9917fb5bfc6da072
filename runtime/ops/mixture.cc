// The mixture: y = h + Experts(RMSNorm(h)), or y = h + Mlp(RMSNorm(h)) in a dense layer; a shared
// expert's result (shared_expert.h) is added to the routed ones'. Experts beside a dense MLP:
// parallel_mixture.h. Forward:
//   n = norm(h);  routing;  rows of n gathered by expert;  gate/up;  GLU;  down;  weighted sum.
// Backward:
//   dn = the experts' (or MLP's) and the router's gradients added up wide;
//   dh = dy + norm backward of dn.
// Shapes as in layer.h, T counting the tokens of the part.

#include "runtime/ops/dense_mlp.h"
#include "runtime/ops/device_operators.h"
#include "runtime/ops/layer.h"
#include "runtime/ops/parallel_mixture.h"
#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"

namespace oom {
namespace {

at::Tensor WeightByRow(const ModelDescription& model, const MixtureSaved& saved) {
  return CombineWeights(model, saved.router).flatten().index_select(0, saved.groups.pair_R);
}

SharedExpertTensors SharedOf(const LayerTensors& tensors) {
  return {.gate_up_FH = tensors.shared_gate_up,
          .down_HI = tensors.shared_down,
          .gate_1H = tensors.shared_gate};
}

// Everything that backward needs; all that a replay computes.
MixtureSaved GateUp(const ModelDescription& model, const LayerDescription& layer,
                    const LayerTensors& weights, const at::Tensor& h_TH, TokenRange tokens) {
  MixtureSaved saved;
  saved.tokens = tokens;
  saved.input_TH = RowsOf(h_TH, tokens);
  const at::Tensor normed_TH = RmsNormForward(saved.input_TH, weights.post_norm, model.norm);
  if (layer.mixture == MixtureKind::kDense) {
    saved.gate_up_RF = DenseGateUpForward(normed_TH, weights.gate_up);
    return saved;
  }
  saved.router = RouterForward(model, normed_TH, weights.router);
  saved.groups = GroupByExpert(saved.router.expert_TK, model.expert_count);
  saved.gate_up_RF = ExpertsGateUpForward(normed_TH.index_select(0, saved.groups.token_R),
                                          weights.gate_up, saved.groups.rows_by_expert);
  if (layer.mixture == MixtureKind::kRoutedAndShared) {
    saved.shared = SharedExpertGateUp(normed_TH, SharedOf(weights));
  }
  return saved;
}

at::Tensor RoutedBackward(const ModelDescription& model, const LayerTensors& weights,
                          const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                          const MixtureSaved& saved, LayerTensors* gradients,
                          const LoadBalanceTerm& balance) {
  const ExpertGroups& groups = saved.groups;
  ClearUnwrittenExperts(gradients);
  const ExpertsGradients experts =
      ExpertsBackward({.x_RH = normed_TH.index_select(0, groups.token_R),
                       .gate_up_RF = saved.gate_up_RF,
                       .weight_R = WeightByRow(model, saved),
                       .dy_RH = dy_TH.index_select(0, groups.token_R)},
                      weights.gate_up, weights.down, groups.rows_by_expert, model.activation,
                      gradients->gate_up, gradients->down);
  at::Tensor dnormed_TH = SumTokenRows(experts.x_RH, groups, WideType(dy_TH.scalar_type()));
  return dnormed_TH.add_(RouterBackward(model, saved.router, ByPair(experts.weight_R, groups),
                                        balance, normed_TH, weights.router, gradients->router));
}

// Of a layer whose branches have no norms.
at::Tensor Down(const ModelDescription& model, const LayerDescription& layer,
                const LayerTensors& weights, const MixtureSaved& kept) {
  if (layer.mixture == MixtureKind::kDense) {
    return DenseDownForward(kept.gate_up_RF, weights.down, model.activation).add_(kept.input_TH);
  }
  at::Tensor y_TH = ExpertsDownForward(kept.gate_up_RF, weights.down, WeightByRow(model, kept),
                                       kept.groups, model.activation);
  if (layer.mixture == MixtureKind::kRoutedAndShared) {
    y_TH.add_(SharedExpertForward(kept.shared, SharedOf(weights)));
  }
  return y_TH.add_(kept.input_TH);
}

}  // namespace

at::Tensor MixtureForward(const ModelDescription& model, const LayerDescription& layer,
                          const LayerTensors& weights, const at::Tensor& h_TH, MixtureSaved* saved,
                          const MixtureOptions& options) {
  if (const DeviceOperators* device = MixtureOperatorsFor(h_TH, model, layer)) {
    return device->mixture_forward(model, layer, weights, h_TH, saved, options);
  }
  const bool parallel = layer.mixture == MixtureKind::kRoutedAndDense;
  MixtureSaved kept = parallel ? ParallelMixtureGateUp(model, weights, h_TH, options.tokens)
                               : GateUp(model, layer, weights, h_TH, options.tokens);
  if (options.stats != nullptr && HasExperts(layer.mixture)) {
    CountRouting(kept.router, options.stats);
  }
  at::Tensor y_TH;
  if (!options.stop_at_gate_up) {
    y_TH = parallel ? ParallelMixtureDown(model, weights, kept) : Down(model, layer, weights, kept);
  }
  if (saved != nullptr) *saved = std::move(kept);
  return y_TH;
}

at::Tensor MixtureBackward(const ModelDescription& model, const LayerDescription& layer,
                           const LayerTensors& weights, const at::Tensor& dy_TH,
                           const MixtureSaved& saved, LayerTensors* gradients,
                           const LoadBalanceTerm& balance) {
  if (const DeviceOperators* device = MixtureOperatorsFor(dy_TH, model, layer)) {
    return device->mixture_backward(model, layer, weights, dy_TH, saved, gradients, balance);
  }
  const at::Tensor dy_rows = RowsOf(dy_TH, saved.tokens);
  if (layer.mixture == MixtureKind::kRoutedAndDense) {
    return ParallelMixtureBackward(model, weights, dy_rows, saved, gradients, balance);
  }
  const at::Tensor normed_TH = RmsNormForward(saved.input_TH, weights.post_norm, model.norm);
  at::Tensor dnormed_TH =
      layer.mixture == MixtureKind::kDense
          ? DenseMlpBackward(dy_rows, normed_TH, saved.gate_up_RF, weights.gate_up, weights.down,
                             model.activation, gradients->gate_up, gradients->down)
          : RoutedBackward(model, weights, dy_rows, normed_TH, saved, gradients, balance);
  if (layer.mixture == MixtureKind::kRoutedAndShared) {
    dnormed_TH.add_(SharedExpertBackward(dy_rows, normed_TH, saved.shared, SharedOf(weights),
                                         SharedOf(*gradients)));
  }
  return RmsNormBackward(dnormed_TH, saved.input_TH, weights.post_norm, model.norm,
                         gradients->post_norm)
      .add_(dy_rows)
      .to(dy_TH.scalar_type());
}

}  // namespace oom
