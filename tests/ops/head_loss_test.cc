// Goal: loss and gradients of the chunked head equal the derivative of the plain one, with ignored
// targets; chunks and token ranges add up; a batch without targets gives zeros.

#include "runtime/ops/head_loss.h"

#include <gtest/gtest.h>

#include "tests/ops/reference.h"

namespace oom::testing {
namespace {

constexpr int64_t kTokens = 23;

at::Tensor Targets(int64_t vocabulary) {
  at::Tensor target = Random({kTokens}, 9).mul_(1000).to(at::kLong).abs_().remainder_(vocabulary);
  for (const int64_t ignored : {int64_t{0}, int64_t{7}, int64_t{8}, kTokens - 1})
    target[ignored] = -1;
  target[3] = 0;
  target[4] = vocabulary - 1;
  return target;
}

HeadTensors RandomHead(const ModelDescription& model, at::ScalarType type) {
  return {.final_norm = Random({model.hidden_size}, 1).mul_(0.2).add_(1).to(type),
          .head = Random({model.vocabulary_size, model.hidden_size}, 2).mul_(0.5).to(type)};
}

HeadTensors Zeros(const HeadTensors& weights, at::ScalarType type) {
  return {.final_norm = at::zeros_like(weights.final_norm, type),
          .head = at::zeros_like(weights.head, type)};
}

// Without a cap, and with one that bends the logits.
class HeadLossCapTest : public ::testing::TestWithParam<double> {};

TEST_P(HeadLossCapTest, GradientIsTheDerivativeOfTheLossForAnyChunk) {
  ModelDescription model = SmallModels()[0].model;
  model.logit_cap = GetParam();
  const HeadTensors weights = RandomHead(model, at::kDouble);
  const at::Tensor x = Random({kTokens, model.hidden_size}, 3).requires_grad_();
  const at::Tensor norm = weights.final_norm.clone().requires_grad_();
  const at::Tensor head = weights.head.clone().requires_grad_();
  const at::Tensor target = Targets(model.vocabulary_size);
  const at::Tensor product = ReferenceNorm(x, norm, model.norm.epsilon).matmul(head.t());
  const at::Tensor logits =
      model.logit_cap == 0.0 ? product : (product / model.logit_cap).tanh() * model.logit_cap;
  const at::Tensor loss = at::cross_entropy_loss(logits, target, {}, at::Reduction::Sum, -1);
  const std::vector<at::Tensor> expected =
      Autograd(loss, at::full({}, 0.125, at::kDouble), {x, norm, head});

  ExpectNear(HeadLogits(model, weights, x.detach()), logits, 1e-12, "logits");
  for (const int64_t chunk : {1, 5, 23, 1000}) {
    HeadTensors gradients = Zeros(weights, at::kDouble);
    const HeadLossResult result =
        HeadLoss(model, weights, x.detach(), target,
                 {.gradient_scale = 0.125, .chunk_tokens = chunk}, &gradients);
    EXPECT_EQ(result.valid_targets.item<int64_t>(), kTokens - 4);
    ExpectNear(result.loss_sum, loss, 1e-12, "loss");
    ExpectNear(result.dx_TH, expected[0], 1e-11, "dx");
    ExpectNear(gradients.final_norm, expected[1], 1e-11, "final_norm");
    ExpectNear(gradients.head, expected[2], 1e-11, "head");
  }
}

INSTANTIATE_TEST_SUITE_P(Caps, HeadLossCapTest, ::testing::Values(0.0, 2.5));

TEST(HeadLossTest, TokenRangesAddUpAndEvaluationGivesTheSameLoss) {
  const ModelDescription model = SmallModels()[0].model;
  const HeadTensors weights = RandomHead(model, at::kFloat);
  const at::Tensor x = Random({kTokens, model.hidden_size}, 4, at::kFloat);
  const at::Tensor target = Targets(model.vocabulary_size);
  HeadTensors whole = Zeros(weights, at::kFloat), sum = Zeros(weights, at::kFloat);
  const HeadLossResult all = HeadLoss(model, weights, x, target, {}, &whole);
  const HeadLossResult evaluated = HeadLoss(model, weights, x, target, {}, nullptr);
  EXPECT_TRUE(BitEqual(all.loss_sum, evaluated.loss_sum));
  EXPECT_FALSE(evaluated.dx_TH.defined());
  double loss = 0.0;
  for (const auto& [first, count] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 10}, {10, 1}, {11, 12}}) {
    const HeadLossResult part =
        HeadLoss(model, weights, x, target,
                 {.chunk_tokens = 4, .tokens = {.first = first, .count = count}}, &sum);
    loss += part.loss_sum.item<double>();
    ExpectNear(part.dx_TH, all.dx_TH.narrow(0, first, count), 1e-6, "dx");
  }
  EXPECT_NEAR(loss, all.loss_sum.item<double>(), 1e-5);
  ExpectNear(sum.head, whole.head, 1e-6, "head");
  ExpectNear(sum.final_norm, whole.final_norm, 1e-6, "final_norm");
}

TEST(HeadLossTest, NoValidTargetGivesZeroLossAndZeroGradient) {
  const ModelDescription model = SmallModels()[0].model;
  const HeadTensors weights = RandomHead(model, at::kFloat);
  HeadTensors gradients = Zeros(weights, at::kFloat);
  const HeadLossResult result =
      HeadLoss(model, weights, Random({6, model.hidden_size}, 5, at::kFloat),
               at::full({6}, -1, at::kLong), {}, &gradients);
  EXPECT_EQ(result.loss_sum.item<double>(), 0.0);
  EXPECT_EQ(result.valid_targets.item<int64_t>(), 0);
  for (const at::Tensor& zero : {result.dx_TH, gradients.head, gradients.final_norm}) {
    EXPECT_TRUE(BitEqual(zero, at::zeros_like(zero)));
  }
}

}  // namespace
}  // namespace oom::testing
