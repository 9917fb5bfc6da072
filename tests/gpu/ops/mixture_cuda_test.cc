// Goal: the GPU's mixture, routed, dense, with a shared expert and with a dense MLP beside the
// experts, is as near to FP64 as the composite in BF16: forward and both of two backwards whose
// gradients accumulate, whole and by token chunk, with the load-balancing loss; experts without
// tokens are not touched.

#include <gtest/gtest.h>

#include <limits>

#include "tests/gpu/ops/cuda_ops_testing.h"

namespace oom::testing {
namespace {

using Chunks = std::vector<TokenRange>;

struct MixtureResult {
  at::Tensor y;
  at::Tensor dh;
  at::Tensor second_dh;
  RouterStats stats;
  LayerTensors gradients;
};

struct MixtureCase {
  const ModelDescription& model;
  LayerDescription layer;
  const LayerTensors& weights;
  at::Tensor h;
  Chunks chunks;
  double balance = 0.0;
  double start = 0.0;      // Of the experts' gradients.
  bool unwritten = false;  // They are marked as holding nothing.
};

MixtureResult RunMixture(const MixtureCase& c, const Setting& setting) {
  const LayerTensors weights = Moved(c.weights, setting.options);
  const at::Tensor h = setting(c.h);
  MixtureResult result;
  result.gradients = ZeroGradients(weights);
  result.gradients.gate_up.fill_(c.start);
  result.gradients.down.fill_(c.start);
  result.gradients.experts_unwritten = c.unwritten;
  std::vector<MixtureSaved> saved(c.chunks.size());
  std::vector<at::Tensor> y;
  for (size_t i = 0; i < c.chunks.size(); ++i) {
    y.push_back(MixtureForward(c.model, c.layer, weights, h, &saved[i],
                               {.tokens = c.chunks[i], .stats = &result.stats}));
  }
  result.y = at::cat(y);
  const LoadBalanceTerm balance = HasExperts(c.layer.mixture)
                                      ? MakeLoadBalanceTerm(result.stats, c.balance)
                                      : LoadBalanceTerm{};
  const auto backward = [&](uint64_t seed) {
    const at::Tensor dy = setting(Random(h.sizes(), seed, at::kBFloat16));
    std::vector<at::Tensor> dh;
    for (const MixtureSaved& part : saved) {
      dh.push_back(
          MixtureBackward(c.model, c.layer, weights, dy, part, &result.gradients, balance));
    }
    return at::cat(dh);
  };
  result.dh = backward(2);
  result.second_dh = backward(3);
  return result;
}

void Compare(const std::string& name, const MixtureCase& c) {
  const MixtureResult gpu = RunMixture(c, Gpu()), composite = RunMixture(c, Composite()),
                      exact = RunMixture(c, Exact());
  Comparison comparison(name);
  comparison.Add("y", gpu.y, composite.y, exact.y);
  comparison.Add("dh", gpu.dh, composite.dh, exact.dh);
  comparison.Add("second dh", gpu.second_dh, composite.second_dh, exact.second_dh);
  for (const auto& [name, field] : LayerFields()) {
    // The mixer's stay zero, and so does that of a scale that is not trained.
    if (!(exact.gradients.*field).defined() ||
        (exact.gradients.*field).abs().max().item<double>() == 0.0) {
      continue;
    }
    comparison.Add("d" + name, gpu.gradients.*field, composite.gradients.*field,
                   exact.gradients.*field);
  }
  EXPECT_EQ(gpu.stats.tokens, exact.stats.tokens);
  if (!HasExperts(c.layer.mixture)) return;
  EXPECT_TRUE(BitEqual(gpu.stats.count_E.to(at::kCPU), exact.stats.count_E)) << name;
  comparison.Add("probability", gpu.stats.probability_E, composite.stats.probability_E,
                 exact.stats.probability_E);
  EXPECT_NEAR(LoadBalanceLoss(gpu.stats).item<double>(),
              LoadBalanceLoss(exact.stats).item<double>(), 1e-2)
      << name;
}

std::vector<MixtureKind> KindsOf(const ModelDescription& model) {
  std::vector<MixtureKind> kinds = {MixtureKind::kRoutedExperts, MixtureKind::kDense};
  if (model.shared_width > 0) kinds.push_back(MixtureKind::kRoutedAndShared);
  if (model.branch_norms) kinds.push_back(MixtureKind::kRoutedAndDense);
  return kinds;
}

std::string NameOf(MixtureKind kind) {
  return kind == MixtureKind::kDense            ? ", dense"
         : kind == MixtureKind::kRoutedExperts  ? ", routed"
         : kind == MixtureKind::kRoutedAndDense ? ", routed and dense"
                                                : ", routed and shared";
}

TEST(MixtureCudaTest, IsAsNearToTheTruthAsTheComposite) {
  const Chunks whole = {{}};
  const Chunks chunks = {
      {.first = 0, .count = 1}, {.first = 1, .count = 130}, {.first = 131, .count = kTokens - 131}};
  for (const NamedModel& named : SmallCudaModels()) {
    for (const MixtureKind kind : KindsOf(named.model)) {
      const bool routed = HasExperts(kind);
      const LayerDescription description = LayerWith(named.model, kind);
      const LayerTensors layer = RandomLayer(named.model, description, 20, at::kBFloat16);
      const at::Tensor h = routed ? RowsOfClearChoice(named.model, layer, kTokens, 1)
                                  : Random({kTokens, named.model.hidden_size}, 1, at::kBFloat16);
      const std::string name = named.name + NameOf(kind);
      Compare(name, {named.model, description, layer, h, whole});
      Compare(name + ", token chunks", {named.model, description, layer, h, chunks});
      if (routed) Compare(name + ", balanced", {named.model, description, layer, h, chunks, 700.0});
    }
  }
}

// Every token to the same K experts: the others have no rows.
TEST(MixtureCudaTest, ExpertsWithoutTokensKeepTheirGradients) {
  for (const NamedModel& named : SmallCudaModels()) {
    const ModelDescription& model = named.model;
    LayerTensors layer = RandomLayer(model, model.layer(0), 30, at::kBFloat16);
    layer.post_norm.fill_(1.0);
    layer.router.zero_();
    for (int64_t e = 0; e < model.experts_per_token; ++e) {
      // Far apart for any rounding, but all with weights that leave a trace in a gradient.
      layer.router.select(0, 2 * e).fill_(0.05 + 0.01 * static_cast<double>(e));
    }
    const double mark = 0.25;
    const MixtureCase c = {model, model.layer(0),
                           layer, Random({kTokens, model.hidden_size}, 6, at::kBFloat16).abs(),
                           {{}},  0.0,
                           mark};
    Compare(named.name + ", idle experts", c);
    const MixtureResult result = RunMixture(c, Gpu());
    for (int64_t e = 0; e < model.expert_count; ++e) {
      const bool used = e % 2 == 0 && e < 2 * model.experts_per_token;
      for (const at::Tensor& gradient : {result.gradients.gate_up, result.gradients.down}) {
        const at::Tensor of_expert = gradient.select(0, e);
        EXPECT_EQ(BitEqual(of_expert, at::full_like(of_expert, mark)), !used)
            << named.name << " expert " << e;
      }
    }
    // What was there before shows nowhere where it counts as unwritten.
    const MixtureResult zeroed =
        RunMixture({model, model.layer(0), layer, c.h, {{0, 77}, {77, kTokens - 77}}}, Gpu());
    const MixtureResult unwritten = RunMixture({model,
                                                model.layer(0),
                                                layer,
                                                c.h,
                                                {{0, 77}, {77, kTokens - 77}},
                                                0.0,
                                                std::numeric_limits<double>::quiet_NaN(),
                                                true},
                                               Gpu());
    EXPECT_TRUE(at::equal(unwritten.gradients.gate_up, zeroed.gradients.gate_up)) << named.name;
    EXPECT_TRUE(at::equal(unwritten.gradients.down, zeroed.gradients.down)) << named.name;
  }
}

}  // namespace
}  // namespace oom::testing
