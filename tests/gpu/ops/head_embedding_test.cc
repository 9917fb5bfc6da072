// Goal: the GPU's head and the embedding's gradient by row: loss and gradients as near to FP64 as
// the composites, for ranges of tokens and chunks that do not divide them, with ignored targets.

#include <gtest/gtest.h>

#include <tuple>

#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "tests/gpu/ops/cuda_ops_testing.h"

namespace oom::testing {
namespace {

struct HeadResult {
  HeadLossResult loss;
  HeadLossResult evaluation;
  HeadTensors gradients;
};

HeadResult RunHead(const ModelDescription& model, const HeadLossOptions& options,
                   const Setting& setting) {
  const at::Tensor x = setting(Random({kTokens, model.hidden_size}, 1, at::kBFloat16));
  const HeadTensors weights = {
      .final_norm = setting(Random({model.hidden_size}, 2).mul(0.2).add(1.0).to(at::kBFloat16)),
      .head = setting(
          Random({model.vocabulary_size, model.hidden_size}, 3).mul(0.2).to(at::kBFloat16))};
  at::Tensor target = at::arange(kTokens).mul_(37).remainder_(model.vocabulary_size);
  target.masked_fill_(at::arange(kTokens).remainder(5).eq(3), -1);
  target = target.to(x.device());
  const at::ScalarType wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  HeadResult result;
  result.gradients = {.final_norm = at::zeros_like(weights.final_norm, wide),
                      .head = at::zeros_like(weights.head, wide)};
  static_cast<void>(HeadLoss(model, weights, x.mul(0.5), target, options, &result.gradients));
  result.loss = HeadLoss(model, weights, x, target, options, &result.gradients);
  result.evaluation = HeadLoss(model, weights, x, target, options, nullptr);
  return result;
}

void CompareHead(const ModelDescription& model) {
  const std::vector<HeadLossOptions> cases = {
      {.gradient_scale = 0.01, .chunk_tokens = 1024},
      {.gradient_scale = 0.01, .chunk_tokens = 100},
      {.gradient_scale = 3.0, .chunk_tokens = 64, .tokens = {.first = 11, .count = 250}}};
  for (const HeadLossOptions& options : cases) {
    const HeadResult gpu = RunHead(model, options, Gpu());
    const HeadResult composite = RunHead(model, options, Composite());
    const HeadResult exact = RunHead(model, options, Exact());
    Comparison comparison("head, cap " + std::to_string(model.logit_cap) + ", chunk " +
                          std::to_string(options.chunk_tokens));
    comparison.Add("dx", gpu.loss.dx_TH, composite.loss.dx_TH, exact.loss.dx_TH);
    comparison.Add("dfinal_norm", gpu.gradients.final_norm, composite.gradients.final_norm,
                   exact.gradients.final_norm);
    comparison.Add("dhead", gpu.gradients.head, composite.gradients.head, exact.gradients.head);

    const double loss = exact.loss.loss_sum.item<double>();
    EXPECT_NEAR(gpu.loss.loss_sum.item<double>(), loss, 1e-3 * loss);
    EXPECT_TRUE(BitEqual(gpu.loss.loss_sum, gpu.evaluation.loss_sum));
    EXPECT_EQ(gpu.loss.loss_sum.scalar_type(), at::kDouble);
    EXPECT_EQ(gpu.loss.valid_targets.item<int64_t>(), exact.loss.valid_targets.item<int64_t>());
    EXPECT_EQ(gpu.evaluation.valid_targets.item<int64_t>(),
              exact.loss.valid_targets.item<int64_t>());
    EXPECT_FALSE(gpu.evaluation.dx_TH.defined());
  }
}

TEST(HeadCudaTest, IsAsNearToTheTruthAsTheComposite) {
  ModelDescription model = SmallCudaModels()[0].model;
  for (const double cap : {0.0, 2.0, 30.0}) {
    model.logit_cap = cap;
    CompareHead(model);
  }
}

TEST(EmbeddingCudaTest, RowsComeByRisingTokenWithRoomForMore) {
  const int64_t hidden = 72;
  const at::Tensor dy = Random({1000, hidden}, 1, at::kBFloat16);
  at::Tensor tokens = at::arange(1000).mul_(7919).remainder_(311);
  tokens.narrow(0, 300, 200).fill_(5);  // One token in many places.
  const RowGradient exact = EmbeddingBackwardByRow(dy.to(at::kDouble), tokens);
  const int64_t rows = exact.row_U.size(0);
  const RowGradient gpu =
      EmbeddingBackwardByRow(dy.to(at::kCUDA), tokens.to(at::kInt).to(at::kCUDA));
  ASSERT_EQ(gpu.sum_UH.sizes(), at::IntArrayRef({1000, hidden}));
  EXPECT_TRUE(at::equal(gpu.row_U.narrow(0, 0, rows).to(at::kCPU), exact.row_U.to(at::kInt)));
  ExpectNear(gpu.sum_UH.narrow(0, 0, rows).to(at::kCPU), exact.sum_UH, 1e-6, "sums");
}

}  // namespace
}  // namespace oom::testing
