#include "tests/ops/ops_testing.h"

#include <gtest/gtest.h>

#include "runtime/ops/precision.h"

namespace oom::testing {

std::vector<NamedModel> SmallModels() {
  ModelDescription qwen;
  qwen.family = Family::kQwen3Moe;
  qwen.hidden_size = 20;
  qwen.expert_count = 7;
  qwen.experts_per_token = 3;
  qwen.expert_width = 12;
  qwen.dense_width = 18;
  qwen.vocabulary_size = 31;
  qwen.layers.resize(1);
  qwen.layers[0].attention = {.query_head_count = 6,
                              .kv_head_count = 2,
                              .head_size = 8,
                              .query_key_norm = true,
                              .rotary = {.theta = 1e4, .size = 8, .pair_count = 4}};
  ModelDescription unnormalized = qwen;
  unnormalized.renormalize_top_k = false;
  ModelDescription yarn = qwen;
  yarn.set_yarn(MakeYarn(/*factor=*/4.0, /*original_positions=*/512));
  ModelDescription mixtral = qwen;
  mixtral.family = Family::kMixtral;
  mixtral.layers[0].attention.query_key_norm = false;
  mixtral.norm.epsilon = 1e-5;
  mixtral.experts_per_token = 2;
  ModelDescription windowed = mixtral;
  windowed.layers[0].attention.sliding_window = 5;
  return {{"qwen3", qwen},
          {"qwen3_unnormalized", unnormalized},
          {"qwen3_yarn", yarn},
          {"mixtral", mixtral},
          {"mixtral_window", windowed}};
}

const std::vector<std::pair<std::string, at::Tensor LayerTensors::*>>& LayerFields() {
  static const std::vector<std::pair<std::string, at::Tensor LayerTensors::*>> fields = {
      {"input_norm", &LayerTensors::input_norm},
      {"query", &LayerTensors::query},
      {"key", &LayerTensors::key},
      {"value", &LayerTensors::value},
      {"output", &LayerTensors::output},
      {"query_norm", &LayerTensors::query_norm},
      {"key_norm", &LayerTensors::key_norm},
      {"post_norm", &LayerTensors::post_norm},
      {"router", &LayerTensors::router},
      {"gate_up", &LayerTensors::gate_up},
      {"down", &LayerTensors::down},
      {"mixer_output_norm", &LayerTensors::mixer_output_norm},
      {"shared_gate_up", &LayerTensors::shared_gate_up},
      {"shared_down", &LayerTensors::shared_down},
      {"shared_gate", &LayerTensors::shared_gate},
      {"shared_output_norm", &LayerTensors::shared_output_norm},
      {"experts_norm", &LayerTensors::experts_norm},
      {"experts_output_norm", &LayerTensors::experts_output_norm},
      {"mixture_output_norm", &LayerTensors::mixture_output_norm},
      {"router_scale", &LayerTensors::router_scale},
      {"expert_scale", &LayerTensors::expert_scale},
      {"layer_scale", &LayerTensors::layer_scale}};
  return fields;
}

at::Tensor Random(at::IntArrayRef shape, uint64_t seed, at::ScalarType type) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble)).to(type);
}

LayerTensors RandomLayer(const ModelDescription& model, const LayerDescription& description,
                         uint64_t seed, at::ScalarType type) {
  const int64_t hidden = model.hidden_size;
  const AttentionDescription& attention = description.attention;
  const int64_t query_rows = attention.query_width() * (attention.output_gate ? 2 : 1);
  const int64_t kv_rows = attention.kv_width();
  const auto weight = [&](at::IntArrayRef shape) {
    return Random(shape, ++seed, at::kDouble).mul_(0.3).to(type);
  };
  const auto norm = [&](int64_t size) {
    return Random({size}, ++seed, at::kDouble).mul_(0.2).add_(1.0).to(type);
  };
  LayerTensors layer;
  layer.input_norm = norm(hidden);
  layer.query = weight({query_rows, hidden});
  layer.key = weight({kv_rows, hidden});
  if (!attention.key_is_value) layer.value = weight({kv_rows, hidden});
  layer.output = weight({hidden, attention.query_width()});
  if (attention.query_key_norm) layer.query_norm = norm(attention.head_size);
  if (attention.query_key_norm) layer.key_norm = norm(attention.head_size);
  layer.post_norm = norm(hidden);
  if (description.mixture == MixtureKind::kRoutedAndShared) {
    layer.shared_gate_up = weight({2 * model.shared_width, hidden});
    layer.shared_down = weight({hidden, model.shared_width});
    layer.shared_gate = weight({1, hidden});
  }
  if (description.mixture == MixtureKind::kDense) {
    layer.gate_up = weight({2 * model.dense_width, hidden});
    layer.down = weight({hidden, model.dense_width});
  } else {
    layer.router = weight({model.expert_count, hidden});
    layer.gate_up = weight({model.expert_count, 2 * model.expert_width, hidden});
    layer.down = weight({model.expert_count, hidden, model.expert_width});
  }
  return layer;
}

LayerDescription LayerWith(const ModelDescription& model, MixtureKind kind) {
  LayerDescription layer = model.layer(0);
  layer.mixture = kind;
  return layer;
}

LayerTensors ZeroGradients(const LayerTensors& weights) {
  LayerTensors zeros;
  for (const auto& [name, field] : LayerFields()) {
    const at::Tensor& weight = weights.*field;
    if (!weight.defined()) continue;
    zeros.*field =
        at::zeros(weight.sizes(), weight.options().dtype(WideType(weight.scalar_type())));
  }
  return zeros;
}

LayerTensors Leaves(const LayerTensors& weights) {
  LayerTensors leaves;
  for (const auto& [name, field] : LayerFields()) {
    if ((weights.*field).defined()) leaves.*field = (weights.*field).clone().requires_grad_();
  }
  return leaves;
}

std::vector<at::Tensor> Autograd(const at::Tensor& output, const at::Tensor& seed_gradient,
                                 const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> gradients = torch::autograd::grad(
      {output}, leaves, {seed_gradient}, /*retain_graph=*/true, /*create_graph=*/false,
      /*allow_unused=*/true);
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(leaves[i]).detach();
  }
  return gradients;
}

double RelativeError(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor wide_expected = expected.detach().to(at::kDouble);
  const double size = wide_expected.norm().item<double>();
  const double error = actual.detach().to(at::kDouble).sub(wide_expected).norm().item<double>();
  return size == 0.0 ? error : error / size;
}

void ExpectNear(const at::Tensor& actual, const at::Tensor& expected, double bar,
                const std::string& what) {
  ASSERT_TRUE(actual.defined() && expected.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  // Written so that NaN fails.
  const double error = RelativeError(actual, expected);
  EXPECT_TRUE(error <= bar) << what << ": relative error " << error << ", bar " << bar;
}

void ExpectNear(const LayerTensors& actual, const LayerTensors& expected, double bar,
                const std::string& what) {
  for (const auto& [name, field] : LayerFields()) {
    ASSERT_EQ((actual.*field).defined(), (expected.*field).defined()) << what << " " << name;
    if (!(actual.*field).defined()) continue;
    ExpectNear(actual.*field, expected.*field, bar, what + " " + name);
  }
}

bool BitEqual(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() || (a.scalar_type() == b.scalar_type() && at::equal(a, b));
}

bool BitEqual(const LayerTensors& a, const LayerTensors& b) {
  for (const auto& [name, field] : LayerFields()) {
    if (!BitEqual(a.*field, b.*field)) return false;
  }
  return true;
}

}  // namespace oom::testing
