#include "runtime/ops/gated_delta_net.h"

#include <utility>

#include "runtime/ops/causal_convolution.h"
#include "runtime/ops/delta_gates.h"
#include "runtime/ops/gated_delta_rule.h"
#include "runtime/ops/gated_rms_norm.h"
#include "runtime/ops/l2_norm.h"
#include "runtime/ops/precision.h"

namespace oom {
namespace {

// Of q's and k's length, in all published models.
constexpr double kL2Epsilon = 1e-6;

// The channels of u by head, as views.
struct Channels {
  Channels(const GatedDeltaNetShape& shape, const at::Tensor& u_TC)
      : query(u_TC.narrow(1, 0, shape.key_width()).view({-1, shape.key_heads, shape.key_size})),
        key(u_TC.narrow(1, shape.key_width(), shape.key_width())
                .view({-1, shape.key_heads, shape.key_size})),
        value(u_TC.narrow(1, 2 * shape.key_width(), shape.value_width())
                  .view({-1, shape.value_heads, shape.value_size})) {}

  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

DeltaGateInput GateInput(const GatedDeltaNetTensors& weights, const at::Tensor& b_TN,
                         const at::Tensor& a_TN) {
  return {.b_TN = b_TN, .a_TN = a_TN, .a_log_N = weights.a_log, .dt_bias_N = weights.dt_bias};
}

GatedDeltaRuleInput RuleInput(const Channels& channels, const DeltaGateInput& gate_input,
                              const at::Tensor& state_DNKV) {
  const DeltaGates gates = DeltaGatesForward(gate_input);
  return {.query_TGK = L2NormForward(channels.query, kL2Epsilon),
          .key_TGK = L2NormForward(channels.key, kL2Epsilon),
          .value_TNV = channels.value,
          .log_decay_TN = gates.log_decay_TN,
          .beta_TN = gates.beta_TN,
          .state_DNKV = state_DNKV};
}

}  // namespace

int64_t GatedDeltaNetSaved::bytes() const {
  return TensorBytes(state.convolution_DPC) + TensorBytes(state.rule_DNKV) + TensorBytes(input_TH) +
         TensorBytes(mixed_TC) + TensorBytes(gate_TNV) + TensorBytes(b_TN) + TensorBytes(a_TN) +
         TensorBytes(attended_TNV);
}

GatedDeltaNetOutput GatedDeltaNetForward(const GatedDeltaNetShape& shape,
                                         const GatedDeltaNetTensors& weights,
                                         const at::Tensor& x_TH, const GatedDeltaNetState& state,
                                         const std::vector<int64_t>& cu_seqlens,
                                         GatedDeltaNetSaved* saved) {
  GatedDeltaNetSaved kept;
  kept.state = state;
  kept.input_TH = x_TH;
  kept.mixed_TC = at::linear(x_TH, weights.query_key_value);
  kept.gate_TNV = at::linear(x_TH, weights.gate).view({-1, shape.value_heads, shape.value_size});
  kept.b_TN = at::linear(x_TH, weights.beta);
  kept.a_TN = at::linear(x_TH, weights.decay);

  const CausalConvolutionOutput convolved = CausalConvolutionForward(
      kept.mixed_TC, weights.convolution.squeeze(1), state.convolution_DPC, cu_seqlens);
  const GatedDeltaRuleOutput rule =
      GatedDeltaRuleForward(RuleInput(Channels(shape, convolved.y_TC),
                                      GateInput(weights, kept.b_TN, kept.a_TN), state.rule_DNKV),
                            cu_seqlens);
  kept.attended_TNV = rule.output_TNV;
  const at::Tensor normed =
      GatedRmsNormForward(kept.attended_TNV, kept.gate_TNV, weights.norm, shape.rms_epsilon);
  GatedDeltaNetOutput result;
  result.y_TH = at::linear(normed.view({-1, shape.value_width()}), weights.output);
  result.state = {.convolution_DPC = convolved.context_DPC, .rule_DNKV = rule.state_DNKV};
  if (saved != nullptr) *saved = std::move(kept);
  return result;
}

GatedDeltaNetGradients GatedDeltaNetBackward(
    const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights, const at::Tensor& dy_TH,
    const GatedDeltaNetState& dstate, const GatedDeltaNetSaved& saved,
    const std::vector<int64_t>& cu_seqlens, GatedDeltaNetTensors* gradients) {
  const at::Tensor normed =
      GatedRmsNormForward(saved.attended_TNV, saved.gate_TNV, weights.norm, shape.rms_epsilon);
  AccumulateWeightGradient(gradients->output, dy_TH, normed.view({-1, shape.value_width()}));
  const GatedRmsNormGradients dnorm = GatedRmsNormBackward(
      at::mm(dy_TH, weights.output).view(saved.attended_TNV.sizes()), saved.attended_TNV,
      saved.gate_TNV, weights.norm, shape.rms_epsilon, gradients->norm);

  const at::Tensor taps_CJ = weights.convolution.squeeze(1);
  const Channels channels(shape, CausalConvolutionForward(saved.mixed_TC, taps_CJ,
                                                          saved.state.convolution_DPC, cu_seqlens)
                                     .y_TC);
  const DeltaGateInput gate_input = GateInput(weights, saved.b_TN, saved.a_TN);
  const GatedDeltaRuleGradients rule =
      GatedDeltaRuleBackward(dnorm.x, dstate.rule_DNKV,
                             RuleInput(channels, gate_input, saved.state.rule_DNKV), cu_seqlens);

  const at::Tensor du_TC =
      at::cat({L2NormBackward(rule.query_TGK, channels.query, kL2Epsilon).flatten(1),
               L2NormBackward(rule.key_TGK, channels.key, kL2Epsilon).flatten(1),
               rule.value_TNV.flatten(1)},
              1);
  const CausalConvolutionGradients convolution =
      CausalConvolutionBackward({.dy_TC = du_TC,
                                 .dcontext_DPC = dstate.convolution_DPC,
                                 .x_TC = saved.mixed_TC,
                                 .context_DPC = saved.state.convolution_DPC},
                                taps_CJ, cu_seqlens, gradients->convolution.squeeze(1));
  const DeltaGateGradients gates =
      DeltaGatesBackward({.beta_TN = rule.beta_TN, .log_decay_TN = rule.log_decay_TN}, gate_input,
                         gradients->a_log, gradients->dt_bias);

  const at::Tensor dgate_TM = dnorm.gate.flatten(1);
  AccumulateWeightGradient(gradients->query_key_value, convolution.x_TC, saved.input_TH);
  AccumulateWeightGradient(gradients->gate, dgate_TM, saved.input_TH);
  AccumulateWeightGradient(gradients->beta, gates.b_TN, saved.input_TH);
  AccumulateWeightGradient(gradients->decay, gates.a_TN, saved.input_TH);
  GatedDeltaNetGradients result;
  result.x_TH = Wide(at::mm(convolution.x_TC, weights.query_key_value));
  AddProduct(result.x_TH, dgate_TM, weights.gate);
  AddProduct(result.x_TH, gates.b_TN, weights.beta);
  AddProduct(result.x_TH, gates.a_TN, weights.decay);
  result.state = {.convolution_DPC = convolution.context_DPC, .rule_DNKV = rule.state_DNKV};
  return result;
}

}  // namespace oom
