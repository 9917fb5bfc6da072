#include "tests/ops/delta_net_reference.h"

#include <cmath>

#include "runtime/ops/precision.h"

namespace oom::testing {
namespace {

at::Tensor Silu(const at::Tensor& x) { return x * x.sigmoid(); }

at::Tensor UnitLength(const at::Tensor& x) { return x / (x.square().sum(-1, true) + 1e-6).sqrt(); }

}  // namespace

at::Tensor ReferenceConvolution(const at::Tensor& x_LC, const at::Tensor& weight_CJ,
                                const at::Tensor& context_PC) {
  const at::Tensor windows_LCJ = at::cat({context_PC, x_LC}).unfold(0, weight_CJ.size(1), 1);
  return Silu((windows_LCJ * weight_CJ).sum(2));
}

GatedDeltaRuleOutput ReferenceDeltaRule(const GatedDeltaRuleInput& input,
                                        const std::vector<int64_t>& cu_seqlens) {
  const int64_t group = input.value_TNV.size(1) / input.key_TGK.size(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(input.key_TGK.size(2)));
  const at::Tensor query = input.query_TGK.repeat_interleave(group, 1) * scale;
  const at::Tensor key = input.key_TGK.repeat_interleave(group, 1);
  std::vector<at::Tensor> outputs, states;
  for (size_t document = 0; document + 1 < cu_seqlens.size(); ++document) {
    at::Tensor state_NKV = input.state_DNKV.select(0, static_cast<int64_t>(document));
    for (int64_t t = cu_seqlens[document]; t < cu_seqlens[document + 1]; ++t) {
      const at::Tensor k = key[t].unsqueeze(2);
      const at::Tensor decayed = state_NKV * input.log_decay_TN[t].exp().view({-1, 1, 1});
      const at::Tensor missing = input.value_TNV[t] - (decayed * k).sum(1);
      const at::Tensor change = missing * input.beta_TN[t].unsqueeze(1);
      state_NKV = decayed + k * change.unsqueeze(1);
      outputs.push_back((state_NKV * query[t].unsqueeze(2)).sum(1));
    }
    states.push_back(state_NKV);
  }
  return {.output_TNV = at::stack(outputs), .state_DNKV = at::stack(states)};
}

GatedDeltaNetOutput ReferenceDeltaNet(const GatedDeltaNetShape& shape,
                                      const GatedDeltaNetTensors& weights, const at::Tensor& x_TH,
                                      const GatedDeltaNetState& state,
                                      const std::vector<int64_t>& cu_seqlens) {
  const at::Tensor mixed = x_TH.matmul(weights.query_key_value.t());
  const int64_t context_rows = weights.convolution.size(2) - 1;
  std::vector<at::Tensor> convolved, contexts;
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    const at::Tensor before = state.convolution_DPC.select(0, static_cast<int64_t>(i));
    const at::Tensor rows = mixed.slice(0, cu_seqlens[i], cu_seqlens[i + 1]);
    convolved.push_back(ReferenceConvolution(rows, weights.convolution.select(1, 0), before));
    const at::Tensor all = at::cat({before, rows});
    contexts.push_back(all.slice(0, all.size(0) - context_rows));
  }
  const std::vector<at::Tensor> parts = at::cat(convolved).split_with_sizes(
      {shape.key_width(), shape.key_width(), shape.value_width()}, 1);

  const at::Tensor a = x_TH.matmul(weights.decay.t()) + weights.dt_bias;
  const GatedDeltaRuleOutput rule = ReferenceDeltaRule(
      {.query_TGK = UnitLength(parts[0].reshape({-1, shape.key_heads, shape.key_size})),
       .key_TGK = UnitLength(parts[1].reshape({-1, shape.key_heads, shape.key_size})),
       .value_TNV = parts[2].reshape({-1, shape.value_heads, shape.value_size}),
       .log_decay_TN = -weights.a_log.exp() * (1 + a.exp()).log(),
       .beta_TN = x_TH.matmul(weights.beta.t()).sigmoid(),
       .state_DNKV = state.rule_DNKV},
      cu_seqlens);
  const at::Tensor& o = rule.output_TNV;
  const at::Tensor gate = x_TH.matmul(weights.gate.t()).view(o.sizes());
  const at::Tensor normed =
      o / (o.square().mean(-1, true) + shape.rms_epsilon).sqrt() * weights.norm * Silu(gate);
  return {.y_TH = normed.flatten(1).matmul(weights.output.t()),
          .state = {.convolution_DPC = at::stack(contexts), .rule_DNKV = rule.state_DNKV}};
}

const std::vector<std::pair<std::string, at::Tensor GatedDeltaNetTensors::*>>& DeltaNetFields() {
  static const std::vector<std::pair<std::string, at::Tensor GatedDeltaNetTensors::*>> fields = {
      {"query_key_value", &GatedDeltaNetTensors::query_key_value},
      {"gate", &GatedDeltaNetTensors::gate},
      {"beta", &GatedDeltaNetTensors::beta},
      {"decay", &GatedDeltaNetTensors::decay},
      {"convolution", &GatedDeltaNetTensors::convolution},
      {"a_log", &GatedDeltaNetTensors::a_log},
      {"dt_bias", &GatedDeltaNetTensors::dt_bias},
      {"norm", &GatedDeltaNetTensors::norm},
      {"output", &GatedDeltaNetTensors::output}};
  return fields;
}

GatedDeltaNetTensors RandomDeltaNet(const GatedDeltaNetShape& shape, int64_t hidden, int64_t taps,
                                    uint64_t seed, at::ScalarType type) {
  const int64_t channels = 2 * shape.key_width() + shape.value_width();
  const auto random = [&](at::IntArrayRef sizes, double deviation, double mean) {
    return Random(sizes, ++seed).mul_(deviation).add_(mean).to(type);
  };
  GatedDeltaNetTensors weights;
  weights.query_key_value = random({channels, hidden}, 0.3, 0);
  weights.gate = random({shape.value_width(), hidden}, 0.3, 0);
  weights.beta = random({shape.value_heads, hidden}, 0.3, 0);
  weights.decay = random({shape.value_heads, hidden}, 0.3, 0);
  weights.convolution = random({channels, 1, taps}, 0.5, 0);
  // Heads that forget at once and heads that hardly forget.
  weights.a_log = random({shape.value_heads}, 1.5, -1);
  weights.dt_bias = random({shape.value_heads}, 1, -1);
  weights.norm = random({shape.value_size}, 0.2, 1);
  weights.output = random({hidden, shape.value_width()}, 0.3, 0);
  return weights;
}

GatedDeltaNetState RandomDeltaNetState(const GatedDeltaNetShape& shape, int64_t documents,
                                       int64_t taps, uint64_t seed, at::ScalarType type) {
  const int64_t channels = 2 * shape.key_width() + shape.value_width();
  return {.convolution_DPC = Random({documents, taps - 1, channels}, seed, type),
          .rule_DNKV = Random({documents, shape.value_heads, shape.key_size, shape.value_size},
                              seed + 1, WideType(type))
                           .mul_(0.3)};
}

GatedDeltaNetTensors ZeroGradients(const GatedDeltaNetTensors& weights) {
  GatedDeltaNetTensors zeros;
  for (const auto& [name, field] : DeltaNetFields()) {
    const at::Tensor& weight = weights.*field;
    zeros.*field =
        at::zeros(weight.sizes(), weight.options().dtype(WideType(weight.scalar_type())));
  }
  return zeros;
}

}  // namespace oom::testing
