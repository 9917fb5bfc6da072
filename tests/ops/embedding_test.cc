// Goal: the embedding's gradient is the derivative, repeated tokens add in token order, and the
// form by row holds the same rows.

#include "runtime/ops/embedding.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/ops/ops_testing.h"

namespace oom::testing {
namespace {

TEST(EmbeddingTest, BackwardIsTheDerivativeOfForwardWithRepeatedTokens) {
  const at::Tensor weight = Random({9, 5}, 1).requires_grad_();
  const at::Tensor tokens = at::tensor({3, 0, 3, 8, 3, 0}, at::kLong);
  const at::Tensor dy = Random({6, 5}, 2);
  const at::Tensor y = at::one_hot(tokens, 9).to(at::kDouble).matmul(weight);
  at::Tensor gradient = at::ones({9, 5}, at::kDouble);
  EmbeddingBackward(dy, tokens, gradient);
  ExpectNear(EmbeddingForward(weight.detach(), tokens), y, 0.0, "y");
  ExpectNear(gradient.sub(1), Autograd(y, dy, {weight})[0], 1e-13, "accumulates");
}

TEST(EmbeddingTest, RowsEqualTheDenseGradientBitForBit) {
  const at::Tensor tokens = Random({500}, 3).mul_(6).to(at::kLong).abs_();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor dy = Random({500, 16}, 4, type);
    at::Tensor dense = at::zeros({64, 16});
    EmbeddingBackward(dy, tokens, dense);
    const RowGradient rows = EmbeddingBackwardByRow(dy, tokens);
    ASSERT_EQ(rows.sum_UH.scalar_type(), at::kFloat);
    EXPECT_TRUE(BitEqual(dense.index_select(0, rows.row_U), rows.sum_UH));
    EXPECT_EQ(dense.ne(0).any(1).sum().item<int64_t>(), rows.row_U.size(0));
  }
}

// Goal: the scale that transformers multiplies by: Gemma 4's, of 2,816 elements, as BF16 and FP32 hold it.
TEST(EmbeddingTest, ScaleIsRoundedToTheWeightsType) {
  ModelDescription model;
  EXPECT_EQ(EmbeddingScale(model, at::kBFloat16), 1.0);
  model.embedding_scale = std::sqrt(2816.0);
  EXPECT_EQ(EmbeddingScale(model, at::kBFloat16), 53.0);
  EXPECT_EQ(EmbeddingScale(model, at::kFloat), static_cast<double>(std::sqrt(2816.0f)));
}

// Goal: FP32 sums do not depend on the run. Method: against a loop over tokens, which fixes the
// order.
TEST(EmbeddingTest, SumsAreInTokenOrder) {
  const at::Tensor tokens = Random({700}, 5).mul_(3).to(at::kLong).abs_();
  const at::Tensor dy = Random({700, 16}, 6, at::kFloat);
  at::Tensor in_order = at::zeros({32, 16});
  for (int64_t t = 0; t < 700; ++t) in_order[tokens[t].item<int64_t>()].add_(dy[t]);
  for (int i = 0; i < 5; ++i) {
    at::Tensor gradient = at::zeros({32, 16});
    EmbeddingBackward(dy, tokens, gradient);
    EXPECT_TRUE(BitEqual(gradient, in_order));
  }
}

}  // namespace
}  // namespace oom::testing
