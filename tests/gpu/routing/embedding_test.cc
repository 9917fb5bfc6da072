// Goal: the embedding's kernels give the composite operator's rows and sums, bit for bit, however
// often a token comes. Method: the composite on the CPU, which adds in token order.

#include "runtime/kernels/embedding.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "runtime/kernels/token_rows.h"
#include "runtime/ops/embedding.h"
#include "tests/gpu/routing/device_tensors.h"

namespace oom::testing {
namespace {

// The arrays of TokenGroups.
struct Grouped {
  at::Tensor count, row, first, position, index, frequent_count, frequent;

  TokenGroups pointers() const {
    return {.count = Pointer<int32_t>(count),
            .row_U = Pointer<int32_t>(row),
            .first_U = Pointer<int32_t>(first),
            .position_T = Pointer<int32_t>(position),
            .index_T = Pointer<int32_t>(index),
            .frequent_count = Pointer<int32_t>(frequent_count),
            .frequent = Pointer<int32_t>(frequent)};
  }
  int64_t rows() const { return count.item<int>(); }
};

Grouped Group(const at::Tensor& token, int64_t vocabulary) {
  const int64_t tokens = token.size(0);
  Grouped grouped;
  for (at::Tensor* array : {&grouped.row, &grouped.first, &grouped.position, &grouped.index}) {
    *array = Poisoned({tokens}, at::kInt);
  }
  grouped.count = Poisoned({1}, at::kInt);
  grouped.frequent_count = Poisoned({1}, at::kInt);
  grouped.frequent = Poisoned({FrequentRows(tokens)}, at::kInt);
  const at::Tensor scratch = Poisoned({GroupTokensScratchBytes(tokens)}, at::kByte);
  GroupTokens(Pointer<int32_t>(token), tokens, vocabulary, grouped.pointers(), scratch.data_ptr(),
              nullptr);
  return grouped;
}

// Tokens of which few come very often, on the GPU.
at::Tensor UnevenTokens(int64_t tokens, int64_t vocabulary, uint64_t seed) {
  return Random({tokens}, seed, at::kFloat)
      .abs_()
      .mul_(2.5)
      .exp_()
      .sub_(1)
      .remainder_(static_cast<double>(vocabulary))
      .to(at::kInt);
}

struct Case {
  int64_t tokens, vocabulary, hidden;
  bool all_equal = false;
  int64_t offset = 0;
};

const std::vector<Case> kCases = {
    {1, 1, 8},
    {33, 5, 40},
    {1000, 300, 2048},
    {20000, 151936, 2048},
    {700, 50, 7},
    {5000, 1000, 136},
    {10000, 10, 192, true},
    {3000, 64, 2055},
    {999, 2, 4096},
    {2000, 40, 64, false, 1},
};

template <class T>
class EmbeddingKernelTest : public ::testing::Test {};
using Types = ::testing::Types<float, __nv_bfloat16>;
TYPED_TEST_SUITE(EmbeddingKernelTest, Types);

at::Tensor TokensOf(const Case& c) {
  return c.all_equal ? at::full({c.tokens}, c.vocabulary - 1, OnDevice(at::kInt))
                     : UnevenTokens(c.tokens, c.vocabulary, 1);
}

TYPED_TEST(EmbeddingKernelTest, SumsByRowEqualTheCompositeBitForBit) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << c.tokens << " " << c.vocabulary << " " << c.hidden);
    const at::Tensor token = TokensOf(c);
    const at::Tensor dy =
        AtOffset(Random({c.tokens, c.hidden}, 2, kScalarType<TypeParam>), c.offset);
    const RowGradient expected = EmbeddingBackwardByRow(dy.cpu(), token.to(at::kLong).cpu());

    const Grouped grouped = Group(token, c.vocabulary);
    ASSERT_EQ(grouped.rows(), expected.row_U.size(0));
    const int64_t rows = grouped.rows();
    EXPECT_TRUE(BitEqual(grouped.row.narrow(0, 0, rows), expected.row_U.to(at::kInt)));
    EXPECT_TRUE(BitEqual(grouped.row.index_select(0, grouped.index), token));
    const EmbeddingShape shape = {.token_count = c.tokens, .hidden_size = c.hidden};
    const at::Tensor sum = Poisoned({rows, c.hidden}, at::kFloat);
    EmbeddingBackwardByRow(shape, Pointer<TypeParam>(dy), grouped.pointers(), Pointer<float>(sum),
                           nullptr);
    EXPECT_TRUE(BitEqual(sum, expected.sum_UH));
    if constexpr (std::is_same_v<TypeParam, __nv_bfloat16>) {
      const at::Tensor rounded = Poisoned({rows, c.hidden}, at::kBFloat16);
      EmbeddingBackwardByRow(shape, Pointer<TypeParam>(dy), grouped.pointers(),
                             Pointer<__nv_bfloat16>(rounded), nullptr);
      EXPECT_TRUE(BitEqual(rounded, expected.sum_UH.to(at::kBFloat16)));
    }
  }
}

TYPED_TEST(EmbeddingKernelTest, AResidentGradientAccumulatesInTokenOrder) {
  for (const Case& c : kCases) {
    if (c.vocabulary > 2000) continue;
    SCOPED_TRACE(::testing::Message() << c.tokens << " " << c.vocabulary << " " << c.hidden);
    const at::Tensor token = TokensOf(c);
    const at::Tensor dy =
        AtOffset(Random({c.tokens, c.hidden}, 3, kScalarType<TypeParam>), c.offset);
    const at::Tensor gradient = Random({c.vocabulary, c.hidden}, 4, at::kFloat);
    const at::Tensor expected = gradient.cpu();
    EmbeddingBackward(dy.cpu(), token.to(at::kLong).cpu(), expected);
    const Grouped grouped = Group(token, c.vocabulary);
    EmbeddingBackward({.token_count = c.tokens, .hidden_size = c.hidden}, Pointer<TypeParam>(dy),
                      grouped.pointers(), Pointer<float>(gradient), nullptr);
    EXPECT_TRUE(BitEqual(gradient, expected));
  }
}

TYPED_TEST(EmbeddingKernelTest, HostRowsThroughStagingEqualALookUp) {
  constexpr int64_t kTokens = 3000;
  for (const int64_t hidden : {2048, 33}) {
    const at::Tensor host = Random({500, hidden}, 5, kScalarType<TypeParam>).cpu().pin_memory();
    const at::Tensor token = UnevenTokens(kTokens, 500, 6);
    const at::Tensor expected = EmbeddingForward(host, token.to(at::kLong).cpu());
    const at::Tensor direct = Poisoned({kTokens, hidden}, kScalarType<TypeParam>);
    EmbeddingForward(Pointer<TypeParam>(host), Pointer<int32_t>(token), kTokens, hidden,
                     Pointer<TypeParam>(direct), nullptr);
    EXPECT_TRUE(BitEqual(direct, expected));

    const Grouped grouped = Group(token, 500);
    const at::Tensor staging = Poisoned({kTokens, hidden}, kScalarType<TypeParam>);
    GatherRows({.index_R = Pointer<int32_t>(grouped.row),
                .row_count = kTokens,
                .hidden_size = hidden,
                .count_on_device = Pointer<int32_t>(grouped.count)},
               Pointer<TypeParam>(host), Pointer<TypeParam>(staging), nullptr);
    const at::Tensor staged = Poisoned({kTokens, hidden}, kScalarType<TypeParam>);
    EmbeddingForward(Pointer<TypeParam>(staging), Pointer<int32_t>(grouped.index), kTokens, hidden,
                     Pointer<TypeParam>(staged), nullptr);
    EXPECT_TRUE(BitEqual(staged, expected));
  }
}

// Goal: offsets beyond 2^31 elements. Method: gradients of 1, whose sums are the tokens' counts.
TEST(EmbeddingKernelTest, MoreElementsThanFitInThirtyTwoBits) {
  constexpr int64_t kTokens = 1100000;
  constexpr int64_t kHidden = 2048;
  const at::Tensor token = UnevenTokens(kTokens, 151936, 7);
  const at::Tensor dy = at::ones({kTokens, kHidden}, OnDevice(at::kBFloat16));
  const Grouped grouped = Group(token, 151936);
  const int64_t rows = grouped.rows();
  const at::Tensor count = at::bincount(token, {}, 151936);
  const at::Tensor row = at::nonzero(count).flatten();
  ASSERT_TRUE(BitEqual(grouped.row.narrow(0, 0, rows), row.to(at::kInt)));
  const at::Tensor sum = Poisoned({rows, kHidden}, at::kFloat);
  EmbeddingBackwardByRow({.token_count = kTokens, .hidden_size = kHidden},
                         Pointer<__nv_bfloat16>(dy), grouped.pointers(), Pointer<float>(sum),
                         nullptr);
  EXPECT_TRUE(at::equal(
      sum, count.index_select(0, row).to(at::kFloat).unsqueeze(1).expand({rows, kHidden})));
}

TEST(EmbeddingKernelTest, NoTokensGiveNoRows) {
  const Grouped grouped = Group(at::empty({0}, OnDevice(at::kInt)), 100);
  EXPECT_EQ(grouped.rows(), 0);
  EmbeddingBackwardByRow({.token_count = 0, .hidden_size = 16}, static_cast<float*>(nullptr),
                         grouped.pointers(), static_cast<float*>(nullptr), nullptr);
}

}  // namespace
}  // namespace oom::testing
