// Goal: the hand-derived backward of each small operator is the derivative of its forward.
// Method: LibTorch's autograd of a plainly written forward, in double, at random points (seeds
// below).

#include <gtest/gtest.h>

#include "runtime/ops/rms_norm.h"
#include "runtime/ops/rotary.h"
#include "runtime/ops/swiglu.h"
#include "tests/ops/reference.h"

namespace oom::testing {
namespace {

RotaryRule Rule(int64_t size, double theta, std::optional<YarnScaling> yarn = std::nullopt) {
  return {.theta = theta, .size = size, .pair_count = size / 2, .yarn = std::move(yarn)};
}

constexpr double kExact = 1e-12;

TEST(RmsNormTest, BackwardIsTheDerivativeOfForward) {
  // Rows of very different size, so that epsilon matters in some; also the shape of a head's norm.
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{9, 20}, {5, 3, 8}}) {
    const at::Tensor x = Random(shape, 1)
                             .mul_(Random({shape[0]}, 2)
                                       .mul_(3)
                                       .exp_()
                                       .view(shape.size() == 2 ? at::IntArrayRef({-1, 1})
                                                               : at::IntArrayRef({-1, 1, 1})))
                             .requires_grad_();
    const at::Tensor weight = Random({shape.back()}, 3).requires_grad_();
    const at::Tensor dy = Random(shape, 4);
    const at::Tensor y = ReferenceNorm(x, weight, 1e-3);
    const std::vector<at::Tensor> expected = Autograd(y, dy, {x, weight});

    at::Tensor dweight = at::ones_like(weight).detach();
    const at::Tensor dx =
        RmsNormBackward(dy, x.detach(), weight.detach(), {.epsilon = 1e-3}, dweight);
    ExpectNear(RmsNormForward(x.detach(), weight.detach(), {.epsilon = 1e-3}), y, kExact, "y");
    ExpectNear(dx, expected[0], kExact, "dx");
    ExpectNear(dweight.sub(1), expected[1], kExact, "dweight accumulates");
  }
}

TEST(RotaryTest, RotationPreservesLengthAndDependsOnRelativePositionOnly) {
  const at::Tensor q = Random({1, 2, 8}, 5), k = Random({1, 2, 8}, 6);
  const auto score = [&](int64_t i, int64_t j) {
    const auto rotate = [&](const at::Tensor& x, int64_t position) {
      return RotaryForward(
          x, MakeRotaryTable(at::full({1}, position, at::kLong), Rule(8, 1e4), at::kDouble));
    };
    EXPECT_NEAR(rotate(q, i).norm().item<double>(), q.norm().item<double>(), 1e-12);
    return (rotate(q, i) * rotate(k, j)).sum().item<double>();
  };
  EXPECT_NEAR(score(7, 3), score(1004, 1000), 1e-9);
  EXPECT_GT(std::abs(score(7, 3) - score(7, 4)), 1e-3);
}

TEST(RotaryTest, BackwardIsTheDerivativeOfForward) {
  const at::Tensor positions = at::cat({at::arange(4, at::kLong), at::arange(3, at::kLong)});
  const RotaryTable table = MakeRotaryTable(positions, Rule(8, 1e4), at::kDouble);
  const at::Tensor x = Random({7, 3, 8}, 7).requires_grad_();
  const at::Tensor dy = Random({7, 3, 8}, 8);
  const at::Tensor cosine = at::cat({table.cosine, table.cosine}, 2);
  const at::Tensor sine = at::cat({table.sine, table.sine}, 2);
  const at::Tensor rotated = at::cat({-x.narrow(2, 4, 4), x.narrow(2, 0, 4)}, 2);
  const at::Tensor y = x * cosine + rotated * sine;
  ExpectNear(RotaryForward(x.detach(), table), y, kExact, "y");
  ExpectNear(RotaryBackward(dy, table), Autograd(y, dy, {x})[0], kExact, "dx");
}

TEST(RotaryTest, AnglesOfLateFp32PositionsAreThoseOfThePublishedModels) {
  // FP32 product of position and frequency, then FP32 sine: not a double angle rounded afterwards.
  const RotaryTable table =
      MakeRotaryTable(at::full({1}, 200003, at::kLong), Rule(128, 1e6), at::kFloat);
  const at::Tensor exponent = at::arange(0, 128, 2, at::kFloat) / 128;
  const at::Tensor frequency = 1.0 / at::pow(1e6, exponent);
  ExpectNear(table.sine.flatten(), at::sin(frequency * 200003.0f), 0.0, "sine");
}

// Goal: the published setting (head of 128, theta 1e6, 32,768 positions, factor 4) leaves the pairs
// up to 23 alone, slows those from 40 on down to a quarter, and ramps between them.
TEST(RotaryTest, YarnSlowsSlowPairsAndScalesCosineAndSine) {
  const YarnScaling yarn = MakeYarn(4.0, 32768);
  EXPECT_NEAR(yarn.attention_factor, 1.1386294361119891, 1e-15);
  const int64_t position = 3;
  const RotaryTable table =
      MakeRotaryTable(at::full({1}, position, at::kLong), Rule(128, 1e6, yarn), at::kDouble);
  for (int64_t i = 0; i < 64; ++i) {
    const double slow = std::clamp((static_cast<double>(i) - 23.0) / 17.0, 0.0, 1.0);
    const double plain = std::pow(1e6, -static_cast<double>(2 * i) / 128.0);
    const double angle = static_cast<double>(position) * plain * (1.0 - slow + slow / 4.0);
    EXPECT_NEAR(table.cosine[0][0][i].item<double>(), yarn.attention_factor * std::cos(angle),
                1e-12)
        << i;
    EXPECT_NEAR(table.sine[0][0][i].item<double>(), yarn.attention_factor * std::sin(angle), 1e-12)
        << i;
  }
}

TEST(RotaryTest, ATableWithYarnIsInvertedUpToTheSquareOfItsFactor) {
  const YarnScaling yarn = MakeYarn(2.0, 64);
  const RotaryTable table =
      MakeRotaryTable(at::arange(7, at::kLong), Rule(8, 1e4, yarn), at::kDouble);
  const at::Tensor x = Random({7, 3, 8}, 11);
  ExpectNear(RotaryBackward(RotaryForward(x, table), table),
             x * (yarn.attention_factor * yarn.attention_factor), kExact, "x");
}

TEST(SwigluTest, BackwardIsTheDerivativeOfForward) {
  const at::Tensor gate_up = Random({6, 14}, 9).mul_(3).requires_grad_();
  const at::Tensor dy = Random({6, 7}, 10);
  const at::Tensor gate = gate_up.narrow(1, 0, 7);
  const at::Tensor up = gate_up.narrow(1, 7, 7);
  const at::Tensor inner = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate.pow(3));
  const std::pair<Activation, at::Tensor> cases[] = {
      {Activation::kSilu, gate * gate.sigmoid() * up},
      {Activation::kGeluTanh, gate / 2 * (1 + inner.tanh()) * up}};
  for (const auto& [activation, y] : cases) {
    ExpectNear(SwigluForward(gate_up.detach(), activation), y, kExact, "y");
    ExpectNear(SwigluBackward(dy, gate_up.detach(), activation), Autograd(y, dy, {gate_up})[0],
               kExact, "dx");
  }
}

}  // namespace
}  // namespace oom::testing
