#include "tests/ops/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace oom::testing {
namespace {

at::Tensor RotateHalf(const at::Tensor& x) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return at::cat({-halves[1], halves[0]}, -1);
}

// Pair by pair, as the models reference has it (1.2).
double YarnFrequency(double frequency, int64_t pair, const RotaryRule& rule) {
  const YarnScaling& yarn = *rule.yarn;
  const auto size = static_cast<double>(rule.size);
  const auto pair_of = [&](double turns) {
    return size * std::log(static_cast<double>(yarn.original_positions) / (2 * M_PI * turns)) /
           (2 * std::log(rule.theta));
  };
  const double low = std::max(std::floor(pair_of(yarn.beta_fast)), 0.0);
  const double high = std::min(std::ceil(pair_of(yarn.beta_slow)), size - 1);
  const double slow = std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
  return frequency * ((1 - slow) + slow / yarn.factor);
}

at::Tensor Rotate(const at::Tensor& x_TNd, const at::Tensor& positions, const RotaryRule& rule) {
  const int64_t size = rule.size;  // All of a head, in these models.
  const double step = -2.0 * std::log(rule.theta) / static_cast<double>(size);
  at::Tensor frequency = at::empty({size / 2}, at::kDouble);
  for (int64_t i = 0; i < size / 2; ++i) {
    const double plain = std::exp(step * static_cast<double>(i));
    frequency[i] = i >= rule.pair_count ? 0.0 : rule.yarn ? YarnFrequency(plain, i, rule) : plain;
  }
  const double scale = rule.yarn ? rule.yarn->attention_factor : 1.0;
  const at::Tensor half_angle = positions.to(at::kDouble).unsqueeze(1) * frequency;
  const at::Tensor angle = at::cat({half_angle, half_angle}, 1).unsqueeze(1);
  return x_TNd * (angle.cos() * scale).to(x_TNd.dtype()) +
         RotateHalf(x_TNd) * (angle.sin() * scale).to(x_TNd.dtype());
}

at::Tensor GatedMlp(const ModelDescription& model, const at::Tensor& x, const at::Tensor& gate_up,
                    const at::Tensor& down) {
  const std::vector<at::Tensor> parts = gate_up.chunk(2, 0);
  const at::Tensor gate = x.matmul(parts[0].t());
  const at::Tensor activated =
      model.activation == Activation::kSilu
          ? gate * gate.sigmoid()
          : gate / 2 * (1 + (std::sqrt(2 / M_PI) * (gate + 0.044715 * gate.pow(3))).tanh());
  return (activated * x.matmul(parts[1].t())).matmul(down.t());
}

// Every expert on every token, with weight 0 where it is not chosen.
at::Tensor RoutedSum(const ModelDescription& model, const LayerTensors& weights,
                     const at::Tensor& x, const at::Tensor& probability) {
  const at::Tensor chosen = std::get<1>(probability.topk(model.experts_per_token, 1));
  const at::Tensor mask = at::zeros_like(probability).detach().scatter(1, chosen, 1.0);
  at::Tensor weight = probability * mask;
  if (model.renormalize_top_k) weight = weight / weight.sum(1, true);
  if (weights.expert_scale.defined()) weight = weight * weights.expert_scale;
  at::Tensor y = at::zeros_like(x);
  for (int64_t e = 0; e < model.expert_count; ++e) {
    y = y + weight.select(1, e).unsqueeze(1) *
                GatedMlp(model, x, weights.gate_up.select(0, e), weights.down.select(0, e));
  }
  return y;
}

// Step by step as the model reference has it (5.2, 5.3).
at::Tensor ParallelMixture(const ModelDescription& model, const LayerTensors& weights,
                           const at::Tensor& h_TH, at::Tensor* probability_TE) {
  const double epsilon = model.norm.epsilon;
  const at::Tensor dense =
      ReferenceNorm(GatedMlp(model, ReferenceNorm(h_TH, weights.post_norm, epsilon),
                             weights.shared_gate_up, weights.shared_down),
                    weights.shared_output_norm, epsilon);
  const at::Tensor router_input = ReferenceNorm(h_TH, weights.router_scale, epsilon) /
                                  std::sqrt(static_cast<double>(model.hidden_size));
  const at::Tensor probability = router_input.matmul(weights.router.t()).softmax(1);
  if (probability_TE != nullptr) *probability_TE = probability;
  const at::Tensor experts = ReferenceNorm(
      RoutedSum(model, weights, ReferenceNorm(h_TH, weights.experts_norm, epsilon), probability),
      weights.experts_output_norm, epsilon);
  const at::Tensor sum = ReferenceNorm(dense + experts, weights.mixture_output_norm, epsilon);
  return weights.layer_scale.detach() * (h_TH + sum);
}

}  // namespace

at::Tensor ReferenceNorm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  return weight * x / (x.square().mean(-1, true) + epsilon).sqrt();
}

at::Tensor ReferenceAttention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const std::vector<int64_t>& cu_seqlens,
                              int64_t window, double score_scale) {
  const int64_t tokens = query.size(0);
  const int64_t group = query.size(1) / key.size(1);
  at::Tensor document = at::empty({tokens}, at::kLong);
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    document.slice(0, cu_seqlens[i - 1], cu_seqlens[i]).fill_(static_cast<int64_t>(i));
  }
  const at::Tensor index = at::arange(tokens, at::kLong);
  const at::Tensor distance = index.unsqueeze(1) - index.unsqueeze(0);
  at::Tensor allowed = distance.ge(0).logical_and(document.unsqueeze(1) == document.unsqueeze(0));
  if (window > 0) allowed = allowed.logical_and(distance.lt(window));

  const at::Tensor q = query.transpose(0, 1);
  const at::Tensor k = key.transpose(0, 1).repeat_interleave(group, 0);
  const at::Tensor v = value.transpose(0, 1).repeat_interleave(group, 0);
  const double scale =
      score_scale == 0.0 ? 1.0 / std::sqrt(static_cast<double>(query.size(2))) : score_scale;
  const at::Tensor scores = q.matmul(k.transpose(1, 2)) * scale;
  const at::Tensor masked =
      scores.masked_fill(allowed.logical_not(), -std::numeric_limits<double>::infinity());
  return masked.softmax(-1).matmul(v).transpose(0, 1);
}

at::Tensor ReferenceMixer(const ModelDescription& model, const LayerDescription& layer,
                          const LayerTensors& weights, const at::Tensor& x_TH,
                          const PackedBatch& batch) {
  const AttentionDescription& attention = layer.attention;
  const int64_t tokens = x_TH.size(0);
  const at::Tensor normed = ReferenceNorm(x_TH, weights.input_norm, model.norm.epsilon);
  at::Tensor q = normed.matmul(weights.query.t()).reshape({tokens, -1, attention.head_size});
  at::Tensor k = normed.matmul(weights.key.t()).reshape({tokens, -1, attention.head_size});
  at::Tensor v = attention.key_is_value
                     ? k
                     : normed.matmul(weights.value.t()).reshape({tokens, -1, attention.head_size});
  const at::Tensor one = at::ones({}, x_TH.options());
  if (attention.value_norm) v = ReferenceNorm(v, one, model.norm.epsilon);
  if (attention.query_key_norm) {
    q = ReferenceNorm(q, weights.query_norm, model.norm.epsilon);
    k = ReferenceNorm(k, weights.key_norm, model.norm.epsilon);
  }
  const at::Tensor attended = ReferenceAttention(
      Rotate(q, batch.positions, attention.rotary), Rotate(k, batch.positions, attention.rotary), v,
      batch.cu_seqlens, attention.sliding_window, attention.score_scale);
  at::Tensor output = attended.reshape({tokens, -1}).matmul(weights.output.t());
  if (model.branch_norms) {
    output = ReferenceNorm(output, weights.mixer_output_norm, model.norm.epsilon);
  }
  return x_TH + output;
}

at::Tensor ReferenceMixture(const ModelDescription& model, const LayerDescription& layer,
                            const LayerTensors& weights, const at::Tensor& h_TH,
                            at::Tensor* probability_TE) {
  if (layer.mixture == MixtureKind::kRoutedAndDense) {
    return ParallelMixture(model, weights, h_TH, probability_TE);
  }
  const at::Tensor normed = ReferenceNorm(h_TH, weights.post_norm, model.norm.epsilon);
  if (layer.mixture == MixtureKind::kDense)
    return h_TH + GatedMlp(model, normed, weights.gate_up, weights.down);
  const at::Tensor probability = normed.matmul(weights.router.t()).softmax(1);
  if (probability_TE != nullptr) *probability_TE = probability;
  return h_TH + RoutedSum(model, weights, normed, probability);
}

at::Tensor ReferenceLoadBalance(const ModelDescription& model, const at::Tensor& probability_TE) {
  const at::Tensor chosen = std::get<1>(probability_TE.topk(model.experts_per_token, 1));
  const at::Tensor fraction =
      at::zeros_like(probability_TE).detach().scatter(1, chosen, 1.0).mean(0);
  return (fraction * probability_TE.mean(0)).sum() * static_cast<double>(model.expert_count);
}

}  // namespace oom::testing
