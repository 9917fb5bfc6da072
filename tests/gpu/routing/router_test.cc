// Goal: the router's kernels choose, weigh and differentiate as runtime/ops/router.h says, whatever
// the number of experts and with many ties. Method: the composite operator in FP64, its router
// matrix the identity, so that its tokens are the logits.

#include "runtime/kernels/router.h"

#include <gtest/gtest.h>

#include <limits>
#include <tuple>
#include <vector>

#include "runtime/kernels/expert_groups.h"
#include "runtime/ops/router.h"
#include "tests/gpu/routing/device_tensors.h"

namespace oom::testing {
namespace {

struct Case {
  int experts;
  int choices;
};

const std::vector<Case> kCases = {{128, 8}, {8, 2},   {1, 1},    {5, 3},    {12, 12},  {16, 1},
                                  {24, 5},  {60, 4},  {64, 16},  {100, 7},  {130, 8},  {256, 8},
                                  {250, 9}, {300, 3}, {512, 16}, {511, 10}, {128, 16}, {32, 8}};
const std::vector<int64_t> kTokens = {1, 7, 64, 1003};

ModelDescription Model(const RouterShape& shape) {
  ModelDescription model;
  model.family = shape.round_weights ? Family::kQwen3Moe : Family::kMixtral;
  model.expert_count = shape.expert_count;
  model.experts_per_token = shape.experts_per_token;
  model.renormalize_top_k = shape.renormalize;
  return model;
}

at::Tensor Identity(int64_t size) { return at::eye(size, OnDevice(at::kDouble)); }

// Multiples of 1/16: many ties, and no two logits so near that their probabilities tie in FP32.
at::Tensor TiedLogits(int64_t tokens, int64_t experts, uint64_t seed, at::ScalarType type) {
  return Random({tokens, experts}, seed, at::kFloat)
      .mul_(24)
      .round_()
      .clamp_(-127, 127)
      .div_(16)
      .to(type);
}

struct Chosen {
  at::Tensor expert_TK;
  at::Tensor weight_TK;
  at::Tensor applied_TK;
  at::Tensor probability_BE;
};

template <class T>
Chosen Choose(const RouterShape& shape, const at::Tensor& logits) {
  const std::vector<int64_t> choices = {shape.token_count, shape.experts_per_token};
  Chosen chosen = {
      .expert_TK = Poisoned(choices, at::kInt),
      .weight_TK = Poisoned(choices, at::kFloat),
      .applied_TK = Poisoned(choices, at::kFloat),
      .probability_BE = Poisoned({RouterBlocks(shape), shape.expert_count}, at::kDouble)};
  RouterForward(shape, Pointer<T>(logits),
                {.expert_TK = Pointer<int32_t>(chosen.expert_TK),
                 .weight_TK = Pointer<float>(chosen.weight_TK),
                 .applied_TK = Pointer<float>(chosen.applied_TK),
                 .probability_BE = Pointer<double>(chosen.probability_BE)},
                nullptr);
  return chosen;
}

template <class T>
class RouterKernelTest : public ::testing::Test {};
using Types = ::testing::Types<float, __nv_bfloat16>;
TYPED_TEST_SUITE(RouterKernelTest, Types);

TYPED_TEST(RouterKernelTest, ChoosesTheLargestLowerExpertsFirstAndWeighsThem) {
  for (const Case& c : kCases) {
    for (const int64_t tokens : kTokens) {
      for (const bool renormalize : {true, false}) {
        SCOPED_TRACE(::testing::Message() << c.experts << " " << c.choices << " " << tokens);
        const RouterShape shape = {.token_count = tokens,
                                   .expert_count = c.experts,
                                   .experts_per_token = c.choices,
                                   .renormalize = renormalize,
                                   .round_weights = renormalize};
        // Every second shape has rows that are not aligned.
        const at::Tensor logits =
            AtOffset(TiedLogits(tokens, c.experts, 1, kScalarType<TypeParam>), tokens % 2);
        const Chosen chosen = Choose<TypeParam>(shape, logits);

        const at::Tensor order = std::get<1>(
            at::sort(logits.to(at::kFloat).cpu(), /*stable=*/true, /*dim=*/1, /*descending=*/true));
        ASSERT_TRUE(BitEqual(chosen.expert_TK.to(at::kLong), order.narrow(1, 0, c.choices)));
        const ModelDescription model = Model(shape);
        const RouterSaved expected =
            RouterForward(model, logits.to(at::kDouble), Identity(c.experts));
        EXPECT_LE(RelativeError(chosen.weight_TK, expected.weight_TK), 3e-7);
        RouterSaved saved = {.logits_TE = logits, .weight_TK = chosen.weight_TK};
        EXPECT_TRUE(BitEqual(chosen.applied_TK, CombineWeights(model, saved).to(at::kFloat)));
      }
    }
  }
}

TYPED_TEST(RouterKernelTest, WeightsEqualTheCompositesOnAnyLogits) {
  for (const Case& c : kCases) {
    const RouterShape shape = {
        .token_count = 517, .expert_count = c.experts, .experts_per_token = c.choices};
    const at::Tensor logits = Random({517, c.experts}, 2, kScalarType<TypeParam>).mul_(3);
    const RouterSaved expected =
        RouterForward(Model(shape), logits.to(at::kFloat), Identity(c.experts).to(at::kFloat));
    EXPECT_LE(RelativeError(Choose<TypeParam>(shape, logits).weight_TK, expected.weight_TK), 1e-6);
  }
}

TYPED_TEST(RouterKernelTest, AnyLogitsGiveDistinctExperts) {
  for (const Case& c : kCases) {
    at::Tensor logits = Random({6, c.experts}, 3, kScalarType<TypeParam>);
    logits[0].fill_(std::numeric_limits<double>::quiet_NaN());
    logits[1].fill_(-std::numeric_limits<double>::infinity());
    logits[2][0] = std::numeric_limits<double>::infinity();
    logits[3][c.experts / 2] = -std::numeric_limits<double>::quiet_NaN();
    logits[4].mul_(1e4);  // Most probabilities are 0.
    logits[5].zero_();
    const RouterShape shape = {
        .token_count = 6, .expert_count = c.experts, .experts_per_token = c.choices};
    const at::Tensor expert = std::get<0>(Choose<TypeParam>(shape, logits).expert_TK.sort(1)).cpu();
    EXPECT_GE(expert.min().item<int>(), 0);
    EXPECT_LT(expert.max().item<int>(), c.experts);
    if (c.choices == 1) continue;
    EXPECT_GT(at::diff(expert, 1, 1).min().item<int>(), 0);
  }
}

TYPED_TEST(RouterKernelTest, StatsEqualTheCompositesAndAddUp) {
  for (const Case& c : kCases) {
    RouterStats expected;
    at::Tensor count = at::zeros({c.experts}, OnDevice(at::kLong));
    at::Tensor probability = at::zeros({c.experts}, OnDevice(at::kDouble));
    for (const int64_t tokens : {int64_t{1003}, int64_t{5}, int64_t{0}, int64_t{9000}}) {
      const RouterShape shape = {
          .token_count = tokens, .expert_count = c.experts, .experts_per_token = c.choices};
      const at::Tensor logits = TiedLogits(tokens, c.experts, 4, kScalarType<TypeParam>);
      const Chosen chosen = Choose<TypeParam>(shape, logits);
      CountRouting({.logits_TE = logits.to(at::kDouble),
                    .expert_TK = chosen.expert_TK.to(at::kLong),
                    .weight_TK = chosen.weight_TK.to(at::kDouble)},
                   &expected);
      const at::Tensor rows = at::bincount(chosen.expert_TK.flatten().cpu(), {}, c.experts);
      const at::Tensor first_row =
          at::cat({at::zeros({1}, at::kLong), rows.cumsum(0)}).to(at::kInt).to(at::kCUDA);
      AddRouterStats(shape, Pointer<double>(chosen.probability_BE), Pointer<int32_t>(first_row),
                     Pointer<int64_t>(count), Pointer<double>(probability), nullptr);
    }
    EXPECT_TRUE(BitEqual(count, expected.count_E));
    EXPECT_LE(RelativeError(probability, expected.probability_E), 1e-6);
    at::Tensor fraction = Poisoned({c.experts}, at::kFloat);
    LoadBalanceFraction(Pointer<int64_t>(count), c.experts, expected.tokens,
                        Pointer<float>(fraction), nullptr);
    EXPECT_LE(RelativeError(fraction, MakeLoadBalanceTerm(expected, 1.0).fraction_E), 1e-6);
  }
}

TYPED_TEST(RouterKernelTest, BackwardEqualsTheCompositesInFp64) {
  for (const Case& c : kCases) {
    for (const int64_t tokens : kTokens) {
      for (const bool renormalize : {true, false}) {
        for (const double coefficient : {0.0, 0.7}) {
          SCOPED_TRACE(::testing::Message() << c.experts << " " << c.choices << " " << tokens << " "
                                            << renormalize << " " << coefficient);
          const RouterShape shape = {.token_count = tokens,
                                     .expert_count = c.experts,
                                     .experts_per_token = c.choices,
                                     .renormalize = renormalize};
          const at::Tensor logits =
              AtOffset(TiedLogits(tokens, c.experts, 5, kScalarType<TypeParam>), tokens % 2);
          const Chosen chosen = Choose<TypeParam>(shape, logits);
          const at::Tensor dweight = Random({tokens, c.choices}, 6, at::kFloat);
          const at::Tensor fraction = Random({c.experts}, 7, at::kFloat).abs_();
          const int64_t all_tokens = 3 * tokens;

          RouterSaved exact =
              RouterForward(Model(shape), logits.to(at::kDouble), Identity(c.experts));
          exact.expert_TK = chosen.expert_TK.to(at::kLong);
          const at::Tensor expected =
              RouterBackward(Model(shape), exact, dweight.to(at::kDouble),
                             {.coefficient = coefficient,
                              .fraction_E = fraction.to(at::kDouble),
                              .tokens = all_tokens},
                             logits.to(at::kDouble), Identity(c.experts),
                             at::zeros({c.experts, c.experts}, OnDevice(at::kDouble)));

          const RouterBackwardInput input = {
              .expert_TK = Pointer<int32_t>(chosen.expert_TK),
              .weight_TK = Pointer<float>(chosen.weight_TK),
              .dweight_TK = Pointer<float>(dweight),
              .balance = {.fraction_E = coefficient == 0.0 ? nullptr : Pointer<float>(fraction),
                          .scale = coefficient * c.experts / static_cast<double>(all_tokens)}};
          const at::Tensor wide = Poisoned({tokens, c.experts}, at::kFloat, tokens % 2);
          RouterBackward(shape, Pointer<TypeParam>(logits), input, Pointer<float>(wide), nullptr);
          // With one choice that is renormalised the gradient is 0, and what remains is rounding.
          if (expected.norm().item<double>() > 0.0) {
            EXPECT_LE(RelativeError(wide, expected), 1e-6);
          } else {
            EXPECT_EQ(wide.norm().item<double>(), 0.0);
          }
          if constexpr (std::is_same_v<TypeParam, __nv_bfloat16>) {
            const at::Tensor rounded = Poisoned({tokens, c.experts}, at::kBFloat16, tokens % 2);
            RouterBackward(shape, Pointer<TypeParam>(logits), input,
                           Pointer<__nv_bfloat16>(rounded), nullptr);
            EXPECT_TRUE(BitEqual(rounded, wide.to(at::kBFloat16)));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace oom::testing
