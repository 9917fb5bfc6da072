// The scalar version against the rule itself: an independent formulation that computes every
// operation in a wider format and rounds once, values worked out by hand, thresholds, NaN, the
// partial sums of ranks.

#include <xmmintrin.h>

#include <cmath>
#include <cstdlib>
#include <limits>

#include "tests/optim/adamw_testing.h"

namespace oom {
namespace {

using Wide = __float128;

// a*b + c rounded once. The product is exact in 113 bits; where the sum is not, the error of the
// sum (exact, by Knuth's two-sum) decides a tie.
float WideFma(float a, float b, float c) {
  if (!std::isfinite(a) || !std::isfinite(b) || !std::isfinite(c)) {
    return static_cast<float>(static_cast<double>(a) * b + static_cast<double>(c));
  }
  const Wide product = static_cast<Wide>(a) * static_cast<Wide>(b);
  const Wide addend = c;
  const Wide sum = product + addend;
  const Wide addend_part = sum - product;
  const Wide error = (product - (sum - addend_part)) + (addend - addend_part);
  const float rounded = static_cast<float>(sum);
  if (error == 0 || !std::isfinite(rounded) || static_cast<Wide>(rounded) == sum) return rounded;
  const float towards = static_cast<Wide>(rounded) < sum ? INFINITY : -INFINITY;
  const float other = std::nextafter(rounded, towards);
  if (sum != (static_cast<Wide>(rounded) + static_cast<Wide>(other)) / 2) return rounded;
  return error > 0 ? std::max(rounded, other) : std::min(rounded, other);
}

// Double has more than twice the digits of float plus two, so rounding twice is rounding once.
float WideMultiply(float a, float b) { return static_cast<float>(static_cast<double>(a) * b); }
float WideAdd(float a, float b) { return static_cast<float>(static_cast<double>(a) + b); }
float WideDivide(float a, float b) { return static_cast<float>(static_cast<double>(a) / b); }
float WideSquareRoot(float x) { return static_cast<float>(std::sqrt(static_cast<double>(x))); }
float Canonical(float x) { return std::isnan(x) ? std::bit_cast<float>(0x7FC00000u) : x; }

struct Parameter {
  float w, m, v;
};

Parameter UpdateByTheRule(const AdamWScalars& s, Parameter p, std::span<const float> partials) {
  float g = partials[0];
  for (size_t rank = 1; rank < partials.size(); ++rank) g = WideAdd(g, partials[rank]);
  if (s.clip != 1.0f) g = WideMultiply(g, s.clip);
  if (std::abs(static_cast<double>(g)) < 0x1p-56) g = 0.0f;
  float m = WideFma(s.beta1, p.m, WideMultiply(s.one_minus_beta1, g));
  float v = WideFma(s.beta2, p.v, WideMultiply(s.one_minus_beta2, WideMultiply(g, g)));
  if (std::abs(static_cast<double>(m)) < 0x1p-100) m = 0.0f;
  if (static_cast<double>(v) < 0x1p-100) v = 0.0f;
  float w = p.w;
  if (s.step_size != 0.0f || s.decay != 1.0f) {
    const float denominator = WideFma(WideSquareRoot(v), s.second_correction, s.epsilon);
    w = Canonical(WideFma(-s.step_size, WideDivide(m, denominator), WideMultiply(s.decay, p.w)));
  }
  return {w, Canonical(m), Canonical(v)};
}

uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }

// Goal: the scalar version is the rule, bit for bit.
TEST(AdamWRuleTest, ScalarEqualsTheIndependentFormulation) {
  const ScopedOptimizerMxcsr mxcsr;
  constexpr int64_t kElements = kTestBlockElements;
  Patterns patterns(101);
  int setting = 0;
  for (const AdamWScalars& scalars : ScalarsToTry()) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      MasterBuffers state(1);
      FillWithPatterns(&patterns, &state, kElements);
      MasterBuffers before = state;
      const Partials<float> gradient(&patterns, ranks, kElements);
      Update(SimdLevel::kScalar, scalars, gradient, &state, 0, kElements);
      for (int64_t i = 0; i < kElements; ++i) {
        std::vector<float> partials;
        for (int rank = 0; rank < ranks; ++rank) partials.push_back(gradient.values[rank][i]);
        const Parameter expected = UpdateByTheRule(
            scalars, {before.Master(i), *before.Moment1(i), *before.Moment2(i)}, partials);
        ASSERT_EQ(BitsOf(expected.m), BitsOf(*state.Moment1(i))) << setting << " " << i;
        ASSERT_EQ(BitsOf(expected.v), BitsOf(*state.Moment2(i))) << setting << " " << i;
        ASSERT_EQ(BitsOf(expected.w), BitsOf(state.Master(i))) << setting << " " << i;
      }
    }
    ++setting;
  }
}

// One parameter through the public call (fifteen more ride along).
Parameter UpdateOne(const AdamWScalars& scalars, Parameter p, std::vector<float> partials) {
  MasterBuffers state(1);
  std::vector<std::vector<float>> values;
  std::vector<const float*> ranks;
  for (const float partial : partials) values.emplace_back(16, partial);
  for (const auto& of_rank : values) ranks.push_back(of_rank.data());
  for (int64_t i = 0; i < 16; ++i) {
    state.SetMaster(i, p.w);
    *state.Moment1(i) = p.m;
    *state.Moment2(i) = p.v;
  }
  AdamWUpdate(SimdLevel::kScalar, scalars, Float32Partials{ranks}, state.At(0), 16);
  return {state.Master(15), *state.Moment1(15), *state.Moment2(15)};
}

// beta1 1/2, beta2 3/4, learning rate 1/4, decay 1/2, gradient 4, first step: every value is exact.
// m = 2, v = 4, q = 1/sqrt(1/4) = 2, a = (1/4)/(1/2) = 1/2, d = 7/8: w = 8*7/8 - 1/2 * 2/(2*2)
// = 6.75.
TEST(AdamWRuleTest, AStepWorkedOutByHand) {
  const AdamWHyperparameters hyper{
      .beta1 = 0.5, .beta2 = 0.75, .epsilon = 0.0, .weight_decay = 0.5};
  const Parameter decayed =
      UpdateOne(MakeAdamWScalars(hyper, 0.25, 1, true, 1.0), {8.0f, 0.0f, 0.0f}, {4.0f});
  EXPECT_EQ(decayed.m, 2.0f);
  EXPECT_EQ(decayed.v, 4.0f);
  EXPECT_EQ(decayed.w, 6.75f);
  const Parameter plain =
      UpdateOne(MakeAdamWScalars(hyper, 0.25, 1, false, 1.0), {8.0f, 0.0f, 0.0f}, {4.0f});
  EXPECT_EQ(plain.w, 7.75f);
  const Parameter clipped =
      UpdateOne(MakeAdamWScalars(hyper, 0.25, 1, false, 0.5), {8.0f, 0.0f, 0.0f}, {8.0f});
  EXPECT_EQ(clipped.m, 2.0f);
  EXPECT_EQ(clipped.v, 4.0f);
}

TEST(AdamWRuleTest, ScalarsAreComputedInDoubleAndRoundedOnce) {
  const AdamWScalars s = MakeAdamWScalars(
      {.beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.1}, 3e-4, 10, true, 0.25);
  EXPECT_EQ(s.beta1, 0.9f);
  EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1.0 - 0.9));
  EXPECT_NE(s.one_minus_beta1, 1.0f - 0.9f);  // What a computation in FP32 would give.
  EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1.0 - 0.999));
  EXPECT_EQ(s.decay, static_cast<float>(1.0 - 3e-4 * 0.1));
  EXPECT_EQ(s.step_size, static_cast<float>(3e-4 / (1.0 - std::pow(0.9, 10.0))));
  EXPECT_EQ(s.second_correction, static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(0.999, 10.0))));
  EXPECT_EQ(s.epsilon, 1e-8f);
  EXPECT_EQ(s.clip, 0.25f);
  EXPECT_EQ(MakeAdamWScalars({.weight_decay = 0.1}, 3e-4, 10, false, 1.0).decay, 1.0f);
}

TEST(AdamWRuleTest, ThresholdsActBelowAndNotAtTheirValue) {
  AdamWScalars s = MakeAdamWScalars({.beta1 = 0.5, .beta2 = 0.5}, 1e-3, 1, false, 1.0);
  EXPECT_EQ(UpdateOne(s, {1, 0, 0}, {0x1p-56f}).m, 0x1p-57f);
  EXPECT_EQ(UpdateOne(s, {1, 0, 0}, {-0x1p-56f}).m, -0x1p-57f);
  const float below = std::nextafter(0x1p-56f, 0.0f);
  EXPECT_EQ(BitsOf(UpdateOne(s, {1, 0, 0}, {below}).m), 0u);
  EXPECT_EQ(BitsOf(UpdateOne(s, {1, 0, 0}, {-below}).m), 0u);  // Positive zero.
  EXPECT_EQ(UpdateOne(s, {1, 0x1p-99f, 0}, {0}).m, 0x1p-100f);
  EXPECT_EQ(BitsOf(UpdateOne(s, {1, -std::nextafter(0x1p-99f, 0.0f), 0}, {0}).m), 0u);
  EXPECT_EQ(UpdateOne(s, {1, 0, 0x1p-99f}, {0}).v, 0x1p-100f);
  EXPECT_EQ(BitsOf(UpdateOne(s, {1, 0, std::nextafter(0x1p-99f, 0.0f)}, {0}).v), 0u);
}

// Goal: the moments of a row without gradients end at exactly zero instead of turning denormal.
TEST(AdamWRuleTest, MomentsOfAnUnusedRowEndAtZero) {
  const ScopedOptimizerMxcsr mxcsr;
  Parameter p{1.0f, 1e-3f, 1e-6f};
  for (int step = 1; step <= 1500; ++step) {
    p = UpdateOne(MakeAdamWScalars({}, 1e-3, step, false, 1.0), p, {0.0f});
    ASSERT_TRUE(p.m == 0.0f || std::isnormal(p.m)) << step;
    ASSERT_TRUE(p.v == 0.0f || std::isnormal(p.v)) << step;
  }
  EXPECT_EQ(BitsOf(p.m), 0u);
  EXPECT_EQ(BitsOf(p.v), 0u);
}

TEST(AdamWRuleTest, EveryStoredNanIsTheCanonicalOne) {
  const AdamWScalars s = MakeAdamWScalars({.weight_decay = 0.1}, 1e-3, 1, true, 1.0);
  for (const uint32_t bits : {0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800001u, 0xFFC00000u, 0x7FFF8000u}) {
    const Parameter bad_gradient = UpdateOne(s, {1, 1, 1}, {std::bit_cast<float>(bits)});
    EXPECT_EQ(BitsOf(bad_gradient.m), 0x7FC00000u);
    EXPECT_EQ(BitsOf(bad_gradient.v), 0x7FC00000u);
    EXPECT_EQ(BitsOf(bad_gradient.w), 0x7FC00000u);
    EXPECT_EQ(BitsOf(UpdateOne(s, {std::bit_cast<float>(bits), 1, 1}, {1}).w), 0x7FC00000u);
  }
  SplitBuffers split(1);
  const std::vector<float> gradient(16, std::numeric_limits<float>::quiet_NaN());
  const float* const ranks[] = {gradient.data()};
  AdamWUpdate(SimdLevel::kScalar, s, Float32Partials{ranks}, split.At(0), 16);
  EXPECT_EQ(split.weight[0], 0x7FC0u);
  EXPECT_EQ(*split.Low(0), 0);
}

// 1 + 2^-24 + 2^-24 is 1 from the left and 1 + 2^-23 from the right; FP32, so 2^-24 twice counts
// for nothing.
TEST(AdamWRuleTest, PartialsAreAddedInRankOrder) {
  const AdamWScalars s = MakeAdamWScalars({.beta1 = 0.0, .beta2 = 0.5}, 1e-3, 1, false, 1.0);
  EXPECT_EQ(UpdateOne(s, {0, 0, 0}, {1.0f, 0x1p-24f, 0x1p-24f}).m, 1.0f);
  EXPECT_EQ(UpdateOne(s, {0, 0, 0}, {0x1p-24f, 0x1p-24f, 1.0f}).m, 1.0f + 0x1p-23f);
}

TEST(AdamWRuleTest, MxcsrScopeTurnsDenormalsOnAndRestores) {
  const unsigned original = _mm_getcsr();
  const unsigned flushing = original | 0x8040u | 0x2000u;  // FTZ, DAZ, rounding down.
  _mm_setcsr(flushing);
  {
    const ScopedOptimizerMxcsr scope;
    EXPECT_EQ(_mm_getcsr() & 0xFFC0u, 0x1F80u);
    volatile float smallest_normal = std::numeric_limits<float>::min();
    volatile float half = smallest_normal * 0.5f;
    EXPECT_GT(half, 0.0f);
  }
  EXPECT_EQ(_mm_getcsr() & 0xFFC0u, flushing & 0xFFC0u);
  _mm_setcsr(original);
}

TEST(AdamWRuleTest, EnvironmentLowersTheLevelAndNeverRaisesIt) {
  const char* const outer = std::getenv("OOM_SIMD");
  const std::string saved = outer == nullptr ? "" : outer;
  unsetenv("OOM_SIMD");
  const SimdLevel best = DetectSimdLevel();
  setenv("OOM_SIMD", "scalar", 1);
  EXPECT_EQ(DetectSimdLevel(), SimdLevel::kScalar);
  setenv("OOM_SIMD", "avx2", 1);
  EXPECT_EQ(DetectSimdLevel(), std::min(best, SimdLevel::kAvx2));
  setenv("OOM_SIMD", "avx512", 1);
  EXPECT_EQ(DetectSimdLevel(), best);
  setenv("OOM_SIMD", "fastest", 1);
  EXPECT_EQ(DetectSimdLevel(), best);
  if (outer == nullptr) {
    unsetenv("OOM_SIMD");
  } else {
    setenv("OOM_SIMD", saved.c_str(), 1);
  }
}

TEST(AdamWDeathTest, RangesThatAreNoMultipleOfSixteenAreBugs) {
  SplitBuffers split(1);
  const std::vector<float> gradient(64, 1.0f);
  const float* const ranks[] = {gradient.data()};
  const AdamWScalars s = ScalarsToTry()[0];
  EXPECT_DEATH(AdamWUpdate(SimdLevel::kScalar, s, Float32Partials{ranks}, split.At(0), 8), "16");
  EXPECT_DEATH(AdamWUpdate(SimdLevel::kScalar, s, Float32Partials{ranks}, split.At(8), 16), "16");
}

}  // namespace
}  // namespace oom
