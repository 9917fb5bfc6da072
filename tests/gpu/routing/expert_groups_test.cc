// Goal: rows by expert are the composite operator's, integer for integer.

#include "runtime/kernels/expert_groups.h"

#include <gtest/gtest.h>

#include <vector>

#include "runtime/ops/experts.h"
#include "tests/gpu/routing/device_tensors.h"

namespace oom::testing {
namespace {

struct Groups {
  at::Tensor first_row_E1, pair_R, token_R, rows_TK;
};

Groups Group(const at::Tensor& expert_TK, int experts) {
  const int64_t tokens = expert_TK.size(0);
  const int64_t choices = expert_TK.size(1);
  const ExpertGroupShape shape = {.token_count = tokens,
                                  .expert_count = experts,
                                  .experts_per_token = static_cast<int>(choices)};
  Groups groups = {.first_row_E1 = Poisoned({experts + 1}, at::kInt),
                   .pair_R = Poisoned({tokens * choices}, at::kInt),
                   .token_R = Poisoned({tokens * choices}, at::kInt),
                   .rows_TK = Poisoned({tokens, choices}, at::kInt)};
  const at::Tensor scratch = Poisoned({ExpertGroupScratchBytes(shape)}, at::kByte);
  GroupRowsByExpert(shape, Pointer<int32_t>(expert_TK),
                    {.first_row_E1 = Pointer<int32_t>(groups.first_row_E1),
                     .pair_R = Pointer<int32_t>(groups.pair_R),
                     .token_R = Pointer<int32_t>(groups.token_R),
                     .rows_TK = Pointer<int32_t>(groups.rows_TK)},
                    scratch.data_ptr(), nullptr);
  return groups;
}

void ExpectCompositeGroups(const at::Tensor& expert_TK, int experts) {
  SCOPED_TRACE(::testing::Message() << expert_TK.sizes() << " of " << experts);
  const Groups groups = Group(expert_TK, experts);
  const ExpertGroups expected = GroupByExpert(expert_TK.to(at::kLong), experts);
  const at::Tensor rows = at::tensor(expected.rows_by_expert, at::kLong);
  EXPECT_TRUE(BitEqual(groups.first_row_E1.cpu(),
                       at::cat({at::zeros({1}, at::kLong), rows.cumsum(0)}).to(at::kInt)));
  EXPECT_TRUE(BitEqual(groups.pair_R, expected.pair_R.to(at::kInt)));
  EXPECT_TRUE(BitEqual(groups.token_R, expected.token_R.to(at::kInt)));
  EXPECT_TRUE(BitEqual(groups.rows_TK, expected.rows_TK.to(at::kInt)));
}

TEST(ExpertGroupKernelTest, EqualTheCompositesAtEverySize) {
  const std::vector<std::pair<int, int>> kShapes = {{128, 8}, {8, 2},  {512, 16}, {7, 3},
                                                    {1, 1},   {60, 4}, {300, 11}, {2, 1}};
  for (const auto& [experts, choices] : kShapes) {
    for (const int64_t tokens : {1, 3, 127, 255, 256, 257, 1024, 5003}) {
      ExpectCompositeGroups(RandomChoices(tokens, choices, experts, tokens), experts);
    }
  }
}

TEST(ExpertGroupKernelTest, EqualTheCompositesWithManyTiles) {
  ExpectCompositeGroups(RandomChoices(300001, 8, 128, 1), 128);
  ExpectCompositeGroups(RandomChoices(150000, 2, 8, 2), 8);
}

TEST(ExpertGroupKernelTest, EveryTokenMayChooseTheSameExperts) {
  ExpectCompositeGroups(at::tensor({3, 0, 9}, OnDevice(at::kInt)).expand({4001, 3}).contiguous(),
                        16);
}

TEST(ExpertGroupKernelTest, NoTokensGiveNoRows) {
  EXPECT_EQ(Group(at::empty({0, 4}, OnDevice(at::kInt)), 32).first_row_E1.abs().max().item<int>(),
            0);
}

TEST(ExpertGroupKernelTest, ValuesGoToRowsAndBack) {
  const at::Tensor expert = RandomChoices(1234, 5, 40, 3);
  const Groups groups = Group(expert, 40);
  const at::Tensor value = Random({1234, 5}, 4, at::kFloat);
  const at::Tensor by_row = Poisoned({1234 * 5}, at::kFloat);
  PairsToRows(Pointer<int32_t>(groups.pair_R), 1234 * 5, Pointer<float>(value),
              Pointer<float>(by_row), nullptr);
  EXPECT_TRUE(BitEqual(by_row, value.flatten().index_select(0, groups.pair_R.to(at::kLong))));
  const at::Tensor back = Poisoned({1234, 5}, at::kFloat);
  RowsToPairs(Pointer<int32_t>(groups.pair_R), 1234 * 5, Pointer<float>(by_row),
              Pointer<float>(back), nullptr);
  EXPECT_TRUE(BitEqual(back, value));
}

TEST(ExpertGroupKernelTest, ProductsAreAddedByExpert) {
  // Expert 0 is chosen most; some of the 300 by nobody.
  const at::Tensor expert = RandomChoices(20003, 3, 300, 5);
  const Groups groups = Group(expert, 300);
  const at::Tensor a = Random({20003 * 3}, 6, at::kFloat), b = Random({20003 * 3}, 7, at::kFloat);
  const at::Tensor start = Random({300}, 8, at::kFloat);
  const auto run = [&] {
    at::Tensor sum = start.clone();
    AddProductsByExpert(Pointer<int32_t>(groups.first_row_E1), 300, Pointer<float>(a),
                        Pointer<float>(b), Pointer<float>(sum), nullptr);
    return sum;
  };
  const at::Tensor by_row =
      expert.flatten().index_select(0, groups.pair_R.to(at::kLong)).to(at::kLong).cpu();
  const at::Tensor expected =
      start.to(at::kDouble).cpu().index_add(0, by_row, a.to(at::kDouble).mul(b).cpu());
  EXPECT_LE(RelativeError(run().cpu(), expected), 1e-6);
  EXPECT_TRUE(BitEqual(run(), run()));
}

}  // namespace
}  // namespace oom::testing
