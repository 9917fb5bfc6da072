// Goal: routing is a valid choice whatever the logits, ties included, and rows sorted by expert
// lose nothing.

#include "runtime/ops/router.h"

#include <gtest/gtest.h>

#include <set>

#include "runtime/ops/experts.h"
#include "tests/ops/ops_testing.h"

namespace oom::testing {
namespace {

TEST(RouterTest, EqualLogitsChooseDistinctExpertsAndTheSameOnesEveryTime) {
  ModelDescription model = SmallModels()[0].model;
  const at::Tensor normed = Random({19, model.hidden_size}, 1, at::kFloat);
  at::Tensor router = at::zeros({model.expert_count, model.hidden_size});
  const RouterSaved all_equal = RouterForward(model, normed, router);
  router.copy_(Random({1, model.hidden_size}, 2, at::kFloat).expand_as(router));
  for (const RouterSaved& saved : {all_equal, RouterForward(model, normed, router)}) {
    for (int64_t t = 0; t < normed.size(0); ++t) {
      std::set<int64_t> chosen;
      for (int64_t k = 0; k < model.experts_per_token; ++k) {
        chosen.insert(saved.expert_TK[t][k].item<int64_t>());
        EXPECT_NEAR(saved.weight_TK[t][k].item<double>(), 1.0 / 3.0, 1e-6);
      }
      EXPECT_EQ(static_cast<int64_t>(chosen.size()), model.experts_per_token);
      EXPECT_GE(*chosen.begin(), 0);
      EXPECT_LT(*chosen.rbegin(), model.expert_count);
    }
  }
  EXPECT_TRUE(BitEqual(RouterForward(model, normed, router).expert_TK,
                       RouterForward(model, normed, router).expert_TK));
}

TEST(RouterTest, ATokenChunkChoosesWhatTheWholeBatchChooses) {
  const ModelDescription model = SmallModels()[0].model;
  const at::Tensor normed = at::zeros({8, model.hidden_size});  // All tied.
  const at::Tensor router = Random({model.expert_count, model.hidden_size}, 3, at::kFloat);
  const at::Tensor whole = RouterForward(model, normed, router).expert_TK;
  EXPECT_TRUE(BitEqual(RouterForward(model, normed.narrow(0, 5, 3), router).expert_TK,
                       whole.narrow(0, 5, 3)));
}

TEST(RouterTest, CombineWeightsAreRoundedForQwen3AndKeptWideForMixtral) {
  for (const NamedModel& named : SmallModels()) {
    const at::Tensor normed = Random({5, named.model.hidden_size}, 4, at::kBFloat16);
    const at::Tensor router =
        Random({named.model.expert_count, named.model.hidden_size}, 5, at::kBFloat16);
    const RouterSaved saved = RouterForward(named.model, normed, router);
    EXPECT_EQ(saved.weight_TK.scalar_type(), at::kFloat);
    EXPECT_EQ(CombineWeights(named.model, saved).scalar_type(),
              named.model.family == Family::kMixtral ? at::kFloat : at::kBFloat16);
  }
}

TEST(ExpertGroupsTest, RowsAreSortedByExpertStablyAndEachTokenFindsItsOwn) {
  const at::Tensor expert = at::tensor({4, 1, 0, 4, 1, 4, 0, 1}, at::kLong).view({4, 2});
  const ExpertGroups groups = GroupByExpert(expert, 6);
  EXPECT_EQ(groups.rows_by_expert, (std::vector<int64_t>{2, 3, 0, 0, 3, 0}));
  EXPECT_TRUE(BitEqual(groups.pair_R, at::tensor({2, 6, 1, 4, 7, 0, 3, 5}, at::kLong)));
  EXPECT_TRUE(BitEqual(groups.token_R, at::tensor({1, 3, 0, 2, 3, 0, 1, 2}, at::kLong)));
  EXPECT_TRUE(
      BitEqual(groups.rows_TK, at::tensor({2, 5, 0, 6, 3, 7, 1, 4}, at::kLong).view({4, 2})));
}

}  // namespace
}  // namespace oom::testing
