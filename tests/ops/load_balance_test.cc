// Goal: one product of averages over all layers, not a mean of losses; uniform routing gives K.

#include "runtime/ops/load_balance.h"

#include <gtest/gtest.h>

#include "runtime/ops/router.h"
#include "tests/ops/ops_testing.h"

namespace oom::testing {
namespace {

TEST(LoadBalanceTest, UniformRoutingCostsK) {
  RouterStats stats;
  stats.count_E = at::full({8}, 6, at::kLong);
  stats.probability_E = at::full({8}, 16.0 / 8.0);
  stats.tokens = 16;  // 48 choices: K = 3.
  EXPECT_NEAR(LoadBalanceLoss(stats).item<double>(), 3.0, 1e-12);
}

TEST(LoadBalanceTest, LossOfTwoLayersIsTheProductOfTheirJointAverages) {
  const ModelDescription model = SmallModels()[0].model;
  RouterStats joint, first, second;
  const auto count = [&](uint64_t seed, std::initializer_list<RouterStats*> targets) {
    const at::Tensor normed = Random({40, model.hidden_size}, seed).add_(0.5);
    const at::Tensor router = Random({model.expert_count, model.hidden_size}, seed + 50);
    for (RouterStats* stats : targets) CountRouting(RouterForward(model, normed, router), stats);
  };
  count(1, {&joint, &first});
  count(2, {&joint, &second});
  EXPECT_EQ(joint.tokens, 80);
  const at::Tensor fraction = (first.count_E + second.count_E).to(at::kDouble) / 80;
  const at::Tensor probability = (first.probability_E + second.probability_E) / 80;
  EXPECT_NEAR(LoadBalanceLoss(joint).item<double>(),
              (fraction * probability).sum().item<double>() * 7, 1e-12);
  EXPECT_GT(
      std::abs(LoadBalanceLoss(joint).item<double>() -
               (LoadBalanceLoss(first).item<double>() + LoadBalanceLoss(second).item<double>()) /
                   2),
      1e-3);
}

TEST(LoadBalanceTest, CoefficientZeroIsNoTerm) {
  EXPECT_EQ(MakeLoadBalanceTerm({}, 0.0).coefficient, 0.0);
}

}  // namespace
}  // namespace oom::testing
