// Goal: rows are moved and added as runtime/ops does, bit for bit, at every row length and
// alignment.

#include "runtime/kernels/token_rows.h"

#include <gtest/gtest.h>

#include <vector>

#include "runtime/ops/experts.h"
#include "tests/gpu/routing/device_tensors.h"

namespace oom::testing {
namespace {

constexpr int64_t kExperts = 24;

struct Case {
  int64_t tokens, choices, hidden;
  int64_t offset = 0;  // In elements: rows begin there.
};

const std::vector<Case> kCases = {
    {1, 1, 8},    {37, 8, 2048}, {500, 2, 4096},    {37, 11, 2055},
    {64, 4, 1},   {129, 16, 40}, {33, 8, 4100},     {37, 8, 2048, 1},
    {90, 9, 136}, {5, 3, 10000}, {300, 2, 2052, 4}, {300, 8, 256, 2},
};

template <class T>
class TokenRowsTest : public ::testing::Test {
 protected:
  static constexpr at::ScalarType kType = kScalarType<T>;

  void Prepare(const Case& c) {
    groups_ =
        GroupByExpert(RandomChoices(c.tokens, c.choices, kExperts, 1).to(at::kLong), kExperts);
    rows_int_ = groups_.rows_TK.to(at::kInt);
    rows_ = {.rows_TK = Pointer<int32_t>(rows_int_),
             .token_count = c.tokens,
             .rows_per_token = c.choices,
             .hidden_size = c.hidden};
  }

  ExpertGroups groups_;
  at::Tensor rows_int_;
  TokenRows rows_;
};
using Types = ::testing::Types<float, __nv_bfloat16>;
TYPED_TEST_SUITE(TokenRowsTest, Types);

TYPED_TEST(TokenRowsTest, GatherAndSpreadBothCopyEachTokenToItsRows) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << c.tokens << " " << c.choices << " " << c.hidden);
    this->Prepare(c);
    const at::Tensor x = AtOffset(Random({c.tokens, c.hidden}, 2, this->kType), c.offset);
    const at::Tensor expected = x.index_select(0, this->groups_.token_R);
    const at::Tensor token = this->groups_.token_R.to(at::kInt);
    const at::Tensor gathered = Poisoned(expected.sizes(), this->kType, c.offset);
    GatherRows(
        {.index_R = Pointer<int32_t>(token), .row_count = token.size(0), .hidden_size = c.hidden},
        Pointer<TypeParam>(x), Pointer<TypeParam>(gathered), nullptr);
    EXPECT_TRUE(BitEqual(gathered, expected));
    const at::Tensor spread = Poisoned(expected.sizes(), this->kType, c.offset);
    SpreadRows(this->rows_, Pointer<TypeParam>(x), Pointer<TypeParam>(spread), nullptr);
    EXPECT_TRUE(BitEqual(spread, expected));
  }
}

TYPED_TEST(TokenRowsTest, GatherStopsAtTheDevicesCount) {
  const at::Tensor x = Random({50, 64}, 3, this->kType);
  const at::Tensor index = at::arange(49, -1, -1, OnDevice(at::kInt));
  const at::Tensor count = at::full({1}, 17, OnDevice(at::kInt));
  const at::Tensor out = at::zeros({50, 64}, OnDevice(this->kType));
  GatherRows({.index_R = Pointer<int32_t>(index),
              .row_count = 50,
              .hidden_size = 64,
              .count_on_device = Pointer<int32_t>(count)},
             Pointer<TypeParam>(x), Pointer<TypeParam>(out), nullptr);
  at::Tensor expected = at::zeros_like(out);
  expected.narrow(0, 0, 17).copy_(x.flip(0).narrow(0, 0, 17));
  EXPECT_TRUE(BitEqual(out, expected));
}

TYPED_TEST(TokenRowsTest, CombineEqualsTheCompositeBitForBit) {
  for (const Case& c : kCases) {
    for (const bool rounded : {true, false}) {  // Qwen3's weights; Mixtral's.
      SCOPED_TRACE(::testing::Message() << c.tokens << " " << c.choices << " " << c.hidden);
      this->Prepare(c);
      const at::Tensor y =
          AtOffset(Random({c.tokens * c.choices, c.hidden}, 4, this->kType), c.offset);
      const at::Tensor residual = AtOffset(Random({c.tokens, c.hidden}, 5, this->kType), c.offset);
      at::Tensor weight = at::sigmoid(Random({c.tokens * c.choices}, 6, at::kFloat));
      if (rounded) weight = weight.to(this->kType);
      const at::Tensor sum =
          SumTokenRows(y.clone().mul_(weight.unsqueeze(1)), this->groups_, this->kType);
      const at::Tensor expected = at::add(sum, residual);

      const at::Tensor wide_weight = weight.to(at::kFloat);
      const at::Tensor combined = Poisoned(residual.sizes(), this->kType, c.offset);
      CombineRows(this->rows_, Pointer<TypeParam>(y), Pointer<float>(wide_weight),
                  Pointer<TypeParam>(residual), Pointer<TypeParam>(combined), nullptr);
      EXPECT_TRUE(BitEqual(combined, expected));
      const TypeParam* const none = nullptr;
      CombineRows(this->rows_, Pointer<TypeParam>(y), Pointer<float>(wide_weight), none,
                  Pointer<TypeParam>(combined), nullptr);
      EXPECT_TRUE(BitEqual(combined, sum));
      // In place.
      CombineRows(this->rows_, Pointer<TypeParam>(y), Pointer<float>(wide_weight),
                  Pointer<TypeParam>(residual), Pointer<TypeParam>(residual), nullptr);
      EXPECT_TRUE(BitEqual(residual, expected));
    }
  }
}

TYPED_TEST(TokenRowsTest, SumsEqualTheCompositeBitForBit) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << c.tokens << " " << c.choices << " " << c.hidden);
    this->Prepare(c);
    const at::Tensor dx =
        AtOffset(Random({c.tokens * c.choices, c.hidden}, 7, this->kType), c.offset);
    const at::Tensor expected = SumTokenRows(dx, this->groups_, at::kFloat);
    const at::Tensor sum = Poisoned({c.tokens, c.hidden}, at::kFloat, c.offset);
    SumTokenRows(this->rows_, Pointer<TypeParam>(dx), Pointer<float>(sum), nullptr);
    EXPECT_TRUE(BitEqual(sum, expected));
    if constexpr (std::is_same_v<TypeParam, __nv_bfloat16>) {
      const at::Tensor rounded = Poisoned({c.tokens, c.hidden}, at::kBFloat16, c.offset);
      SumTokenRows(this->rows_, Pointer<TypeParam>(dx), Pointer<__nv_bfloat16>(rounded), nullptr);
      EXPECT_TRUE(BitEqual(rounded, expected.to(at::kBFloat16)));
    }
  }
}

TYPED_TEST(TokenRowsTest, NoTokensNeedNothing) {
  const TokenRows none = {.rows_per_token = 8, .hidden_size = 16};
  const TypeParam* nothing = nullptr;
  TypeParam* nowhere = nullptr;
  GatherRows({.hidden_size = 16}, nothing, nowhere, nullptr);
  SpreadRows(none, nothing, nowhere, nullptr);
  CombineRows(none, nothing, nullptr, nothing, nowhere, nullptr);
  SumTokenRows(none, nothing, static_cast<float*>(nullptr), nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Goal: offsets beyond 2^31 elements.
TEST(TokenRowsTest, MoreElementsThanFitInThirtyTwoBits) {
  constexpr int64_t kTokens = 140000;
  constexpr int64_t kChoices = 8;
  constexpr int64_t kHidden = 2048;
  const ExpertGroups groups =
      GroupByExpert(RandomChoices(kTokens, kChoices, 128, 8).to(at::kLong), 128);
  const at::Tensor rows_int = groups.rows_TK.to(at::kInt);
  const TokenRows rows = {.rows_TK = Pointer<int32_t>(rows_int),
                          .token_count = kTokens,
                          .rows_per_token = kChoices,
                          .hidden_size = kHidden};
  const at::Tensor x = Random({kTokens, kHidden}, 9, at::kBFloat16);
  const at::Tensor spread = Poisoned({kTokens * kChoices, kHidden}, at::kBFloat16);
  SpreadRows(rows, Pointer<__nv_bfloat16>(x), Pointer<__nv_bfloat16>(spread), nullptr);
  EXPECT_TRUE(at::equal(spread, x.index_select(0, groups.token_R)));
  const at::Tensor token = groups.token_R.to(at::kInt);
  spread.fill_(0);
  GatherRows(
      {.index_R = Pointer<int32_t>(token), .row_count = kTokens * kChoices, .hidden_size = kHidden},
      Pointer<__nv_bfloat16>(x), Pointer<__nv_bfloat16>(spread), nullptr);
  EXPECT_TRUE(at::equal(spread, x.index_select(0, groups.token_R)));
  // Eight equal rows: the sum is the token times 8, exactly.
  const at::Tensor sum = Poisoned({kTokens, kHidden}, at::kBFloat16);
  SumTokenRows(rows, Pointer<__nv_bfloat16>(spread), Pointer<__nv_bfloat16>(sum), nullptr);
  EXPECT_TRUE(at::equal(sum, at::mul(x, 8)));
  const at::Tensor weight = at::full({kTokens * kChoices}, 0.5, OnDevice(at::kFloat));
  CombineRows(rows, Pointer<__nv_bfloat16>(spread), Pointer<float>(weight),
              Pointer<__nv_bfloat16>(x), Pointer<__nv_bfloat16>(sum), nullptr);
  EXPECT_LE(RelativeError(sum.narrow(0, kTokens - 100, 100),
                          at::mul(x.narrow(0, kTokens - 100, 100).to(at::kDouble), 5)),
            1e-2);
}

}  // namespace
}  // namespace oom::testing
