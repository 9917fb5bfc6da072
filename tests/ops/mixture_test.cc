// Goal: the mixture's backward (routed and dense) is the derivative of its forward; token chunks
// add up to the whole; experts without tokens are exact and untouched; replay stops early and
// changes no bit.

#include <gtest/gtest.h>

#include <limits>

#include "runtime/ops/layer.h"
#include "tests/ops/reference.h"

namespace oom::testing {
namespace {

constexpr int64_t kTokens = 27;

struct MixtureCase {
  NamedModel named;
  LayerDescription layer;
};

std::vector<MixtureCase> Cases() {
  std::vector<MixtureCase> cases;
  for (const NamedModel& named : SmallModels()) {
    cases.push_back({named, named.model.layer(0)});
  }
  const NamedModel dense = SmallModels()[0];
  cases.push_back({dense, LayerWith(dense.model, MixtureKind::kDense)});
  return cases;
}

LayerTensors Detached(const LayerTensors& leaves) {
  LayerTensors weights;
  for (const auto& [name, field] : LayerFields()) {
    if ((leaves.*field).defined()) weights.*field = (leaves.*field).detach();
  }
  return weights;
}

TEST(MixtureTest, BackwardIsTheDerivativeOfForward) {
  for (const auto& [named, layer] : Cases()) {
    const ModelDescription& model = named.model;
    const LayerTensors leaves = Leaves(RandomLayer(model, layer, 100));
    const LayerTensors weights = Detached(leaves);
    const at::Tensor h = Random({kTokens, model.hidden_size}, 1).requires_grad_();
    const at::Tensor dy = Random({kTokens, model.hidden_size}, 2);
    const at::Tensor y = ReferenceMixture(model, layer, leaves, h);

    MixtureSaved saved;
    LayerTensors gradients = ZeroGradients(weights);
    ExpectNear(MixtureForward(model, layer, weights, h.detach(), &saved), y, 1e-12, named.name);
    const at::Tensor dh = MixtureBackward(model, layer, weights, dy, saved, &gradients);
    ExpectNear(dh, Autograd(y, dy, {h})[0], 1e-11, named.name + " dh");
    for (const auto& [name, field] : LayerFields()) {
      if (!(leaves.*field).defined()) continue;
      ExpectNear(gradients.*field, Autograd(y, dy, {leaves.*field})[0], 1e-11,
                 named.name + " " + name);
    }
  }
}

TEST(MixtureTest, LoadBalanceGradientOfALayerIsTheDerivativeOfTheLoss) {
  for (const NamedModel& named : SmallModels()) {
    const ModelDescription& model = named.model;
    const LayerDescription& layer = model.layer(0);
    const LayerTensors leaves = Leaves(RandomLayer(model, layer, 150));
    const LayerTensors weights = Detached(leaves);
    const at::Tensor h = Random({kTokens, model.hidden_size}, 3).requires_grad_();
    at::Tensor probability;
    const at::Tensor y = ReferenceMixture(model, layer, leaves, h, &probability);
    const at::Tensor loss = ReferenceLoadBalance(model, probability) * 0.7 + (y * 0.0).sum();

    MixtureSaved saved;
    RouterStats stats;
    MixtureForward(model, layer, weights, h.detach(), &saved, {.stats = &stats});
    EXPECT_EQ(stats.count_E.sum().item<int64_t>(), kTokens * model.experts_per_token);
    EXPECT_NEAR(LoadBalanceLoss(stats).item<double>(), loss.item<double>() / 0.7, 1e-12);
    LayerTensors gradients = ZeroGradients(weights);
    const at::Tensor dh = MixtureBackward(model, layer, weights, at::zeros_like(y).detach(), saved,
                                          &gradients, MakeLoadBalanceTerm(stats, 0.7));
    const at::Tensor one = at::ones({}, at::kDouble);
    ExpectNear(dh, Autograd(loss, one, {h})[0], 1e-11, named.name + " dh");
    ExpectNear(gradients.router, Autograd(loss, one, {leaves.router})[0], 1e-11, named.name);
    ExpectNear(gradients.post_norm, Autograd(loss, one, {leaves.post_norm})[0], 1e-11, named.name);
  }
}

TEST(MixtureTest, TokenChunksAddUpToTheWholeWithinFp32Rounding) {
  for (const auto& [named, layer] : Cases()) {
    const ModelDescription& model = named.model;
    const LayerTensors weights = RandomLayer(model, layer, 200, at::kFloat);
    const at::Tensor h = Random({kTokens, model.hidden_size}, 4, at::kFloat);
    const at::Tensor dy = Random({kTokens, model.hidden_size}, 5, at::kFloat);
    MixtureSaved whole;
    RouterStats whole_stats, stats;
    LayerTensors whole_gradients = ZeroGradients(weights), gradients = ZeroGradients(weights);
    const at::Tensor y = MixtureForward(model, layer, weights, h, &whole, {.stats = &whole_stats});
    const at::Tensor dh = MixtureBackward(model, layer, weights, dy, whole, &whole_gradients);

    for (const auto& [first, count] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 13}, {14, kTokens - 14}}) {
      MixtureSaved part;
      const at::Tensor y_part =
          MixtureForward(model, layer, weights, h, &part,
                         {.tokens = {.first = first, .count = count}, .stats = &stats});
      ExpectNear(y_part, y.narrow(0, first, count), 1e-6, named.name + " y");
      ExpectNear(MixtureBackward(model, layer, weights, dy, part, &gradients),
                 dh.narrow(0, first, count), 1e-6, named.name + " dh");
    }
    ExpectNear(gradients, whole_gradients, 1e-6, named.name);
    if (HasExperts(layer.mixture)) {
      EXPECT_TRUE(BitEqual(stats.count_E, whole_stats.count_E));
      EXPECT_EQ(stats.tokens, whole_stats.tokens);
    }
  }
}

// What was there before shows nowhere, and the first of several parts alone writes.
TEST(MixtureTest, UnwrittenExpertsGetTheGradientsOfZeroedOnes) {
  const std::vector<TokenRange> parts = {{0, 13}, {13, kTokens - 13}};
  for (const auto& [named, layer] : Cases()) {
    if (!HasExperts(layer.mixture)) continue;
    const ModelDescription& model = named.model;
    const LayerTensors weights = RandomLayer(model, layer, 210, at::kFloat);
    const at::Tensor h = Random({kTokens, model.hidden_size}, 4, at::kFloat);
    const at::Tensor dy = Random({kTokens, model.hidden_size}, 5, at::kFloat);
    LayerTensors zeroed = ZeroGradients(weights), unwritten = ZeroGradients(weights);
    unwritten.gate_up.fill_(std::numeric_limits<float>::quiet_NaN());
    unwritten.down.fill_(std::numeric_limits<float>::quiet_NaN());
    unwritten.experts_unwritten = true;
    for (LayerTensors* gradients : {&zeroed, &unwritten}) {
      for (const TokenRange& tokens : parts) {
        MixtureSaved part;
        MixtureForward(model, layer, weights, h, &part, {.tokens = tokens});
        MixtureBackward(model, layer, weights, dy, part, gradients);
      }
    }
    EXPECT_FALSE(unwritten.experts_unwritten);
    EXPECT_TRUE(at::equal(unwritten.gate_up, zeroed.gate_up)) << named.name;
    EXPECT_TRUE(at::equal(unwritten.down, zeroed.down)) << named.name;
  }
}

// Every token to the same K experts: the others have no rows.
TEST(MixtureTest, ExpertsWithoutTokensKeepTheirGradientsAndTheRestStaysExact) {
  for (const NamedModel& named : SmallModels()) {
    const ModelDescription& model = named.model;
    const LayerDescription& layer = model.layer(0);
    LayerTensors weights = RandomLayer(model, layer, 300);
    weights.post_norm.fill_(1.0);
    const at::Tensor h = Random({kTokens, model.hidden_size}, 6).abs_();
    weights.router.zero_();
    for (int64_t e = 0; e < model.experts_per_token; ++e) {
      weights.router.select(0, 2 * e).fill_(0.5 + 0.1 * static_cast<double>(e));
    }
    const LayerTensors leaves = Leaves(weights);
    const at::Tensor dy = Random({kTokens, model.hidden_size}, 7);
    const at::Tensor y = ReferenceMixture(model, layer, leaves, h);
    MixtureSaved saved;
    ExpectNear(MixtureForward(model, layer, weights, h, &saved), y, 1e-12, named.name);
    LayerTensors gradients = ZeroGradients(weights);
    const double mark = 0.25;
    gradients.gate_up.fill_(mark);
    gradients.down.fill_(mark);
    MixtureBackward(model, layer, weights, dy, saved, &gradients);
    ExpectNear(gradients.gate_up.sub(mark), Autograd(y, dy, {leaves.gate_up})[0], 1e-11,
               named.name);
    for (int64_t e = 0; e < model.expert_count; ++e) {
      const int64_t rows = saved.groups.rows_by_expert[static_cast<size_t>(e)];
      const bool used = e % 2 == 0 && e < 2 * model.experts_per_token;
      EXPECT_EQ(rows, used ? kTokens : 0) << named.name << " expert " << e;
      if (used) continue;
      EXPECT_TRUE(BitEqual(gradients.gate_up.select(0, e),
                           at::full_like(gradients.gate_up.select(0, e), mark)));
      EXPECT_TRUE(
          BitEqual(gradients.down.select(0, e), at::full_like(gradients.down.select(0, e), mark)));
    }
  }
}

TEST(MixtureTest, BackwardOfAReplayHasTheSameBits) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const auto& [named, layer] : Cases()) {
      const ModelDescription& model = named.model;
      const LayerTensors weights = RandomLayer(model, layer, 400, type);
      const at::Tensor h = Random({kTokens, model.hidden_size}, 8, type);
      const at::Tensor dy = Random({kTokens, model.hidden_size}, 9, type);
      MixtureSaved kept, replayed;
      MixtureForward(model, layer, weights, h, &kept);
      const at::Tensor nothing =
          MixtureForward(model, layer, weights, h.clone(), &replayed, {.stop_at_gate_up = true});
      EXPECT_FALSE(nothing.defined());
      EXPECT_EQ(kept.bytes(), replayed.bytes());
      LayerTensors from_kept = ZeroGradients(weights), from_replay = ZeroGradients(weights);
      const at::Tensor dh = MixtureBackward(model, layer, weights, dy, kept, &from_kept);
      EXPECT_TRUE(BitEqual(dh, MixtureBackward(model, layer, weights, dy, replayed, &from_replay)));
      EXPECT_TRUE(BitEqual(from_kept, from_replay)) << named.name;
    }
  }
}

}  // namespace
}  // namespace oom::testing
