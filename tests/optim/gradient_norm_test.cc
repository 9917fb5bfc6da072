// The norm is one defined sum: 16 strided FP64 lanes a block, a fixed tree, the same bits at every
// level.

#include <cmath>
#include <limits>

#include "tests/optim/adamw_testing.h"

namespace oom {
namespace {

constexpr int64_t kBlocks = 3;
constexpr int64_t kElements = kBlocks * kTestBlockElements;

template <class T>
bool Squares(SimdLevel level, const Partials<T>& gradient, std::vector<double>* blocks) {
  blocks->assign(kBlocks, -1.0);
  const auto ranks = gradient.At(0);
  if constexpr (sizeof(T) == 2) {
    return GradientSquares(level, Bfloat16Partials{ranks}, kElements, *blocks);
  } else {
    return GradientSquares(level, Float32Partials{ranks}, kElements, *blocks);
  }
}

float Value(float x) { return x; }
float Value(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

template <class T>
float SumAt(const Partials<T>& gradient, int64_t i) {
  float sum = Value(gradient.values[0][i]);
  for (size_t rank = 1; rank < gradient.values.size(); ++rank) {
    sum = sum + Value(gradient.values[rank][i]);
  }
  return sum;
}

template <class T>
void MakeOrdinary(Patterns* patterns, Partials<T>* gradient) {
  for (auto& of_rank : gradient->values) {
    for (T& value : of_rank) {
      const float x = 1e-3f * patterns->Ordinary();
      if constexpr (sizeof(T) == 2) {
        RoundToBfloat16({&x, 1}, &value);
      } else {
        value = x;
      }
    }
  }
}

template <class T>
void ExpectAllLevelsEqual(int ranks, bool ordinary, uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "ranks " << ranks << ", seed " << seed);
  Patterns patterns(seed);
  Partials<T> gradient(&patterns, ranks, kElements);
  if (ordinary) MakeOrdinary(&patterns, &gradient);
  std::vector<double> expected, actual;
  const bool finite = Squares(SimdLevel::kScalar, gradient, &expected);
  for (const SimdLevel level : {SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (level > DetectSimdLevel()) continue;
    EXPECT_EQ(Squares(level, gradient, &actual), finite);
    EXPECT_TRUE(SameBytes(expected, actual)) << SimdLevelName(level);
  }
}

TEST(GradientNormTest, LevelsAreBitEqual) {
  if (DetectSimdLevel() == SimdLevel::kScalar) GTEST_SKIP() << "only the scalar level is here";
  for (int ranks = 1; ranks <= 3; ++ranks) {
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      ExpectAllLevelsEqual<uint16_t>(ranks, seed % 2 == 0, seed);
      ExpectAllLevelsEqual<float>(ranks, seed % 2 == 0, seed);
    }
  }
}

// Goal: the order of the sum is the defined one. Method: lanes and tree written out again, bit
// equality.
TEST(GradientNormTest, SumHasTheDefinedOrder) {
  Patterns patterns(11);
  Partials<float> gradient(&patterns, 2, kElements);
  MakeOrdinary(&patterns, &gradient);
  std::vector<double> blocks;
  ASSERT_TRUE(Squares(DetectSimdLevel(), gradient, &blocks));
  for (int64_t block = 0; block < kBlocks; ++block) {
    double lane[16] = {};
    for (int64_t i = 0; i < kTestBlockElements; ++i) {
      const double x = SumAt(gradient, block * kTestBlockElements + i);
      lane[i % 16] += x * x;
    }
    const auto eight = [&](int i) { return lane[i] + lane[i + 8]; };
    const auto four = [&](int i) { return eight(i) + eight(i + 4); };
    const auto two = [&](int i) { return four(i) + four(i + 2); };
    EXPECT_EQ(blocks[block], two(0) + two(1));
  }
}

TEST(GradientNormTest, SumIsTheNormOfTheSummedGradient) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    Patterns patterns(20 + ranks);
    Partials<uint16_t> gradient(&patterns, ranks, kElements);
    MakeOrdinary(&patterns, &gradient);
    std::vector<double> blocks;
    ASSERT_TRUE(Squares(DetectSimdLevel(), gradient, &blocks));
    long double expected = 0.0L;
    for (int64_t i = 0; i < kElements; ++i) {
      expected += static_cast<long double>(SumAt(gradient, i)) * SumAt(gradient, i);
    }
    double actual = 0.0;
    for (const double block : blocks) actual += block;
    EXPECT_NEAR(actual / static_cast<double>(expected), 1.0, 1e-13);
  }
}

TEST(GradientNormTest, HugeFiniteGradientsStayFinite) {
  Patterns patterns(30);
  Partials<float> gradient(&patterns, 1, kElements);
  for (float& g : gradient.values[0]) g = std::numeric_limits<float>::max();
  std::vector<double> blocks;
  EXPECT_TRUE(Squares(DetectSimdLevel(), gradient, &blocks));
  EXPECT_TRUE(std::isfinite(blocks[0]));
}

// Goal: one bad value anywhere is found, and only its block's sum is bad.
TEST(GradientNormTest, AnyNonFiniteValueIsReported) {
  Patterns patterns(31);
  for (const SimdLevel level : {SimdLevel::kScalar, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (level > DetectSimdLevel()) continue;
    for (const uint32_t bits : {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFFFFFFFu, 0x7F800001u}) {
      Partials<float> gradient(&patterns, 1, kElements);
      MakeOrdinary(&patterns, &gradient);
      std::vector<double> blocks;
      ASSERT_TRUE(Squares(level, gradient, &blocks));
      const int64_t place = patterns.Bits() % kElements;
      gradient.values[0][place] = std::bit_cast<float>(bits);
      EXPECT_FALSE(Squares(level, gradient, &blocks)) << place;
      for (int64_t block = 0; block < kBlocks; ++block) {
        EXPECT_EQ(std::isfinite(blocks[block]), block != place / kTestBlockElements);
      }
    }
  }
}

// The sum over ranks can overflow where no rank's partial does.
TEST(GradientNormTest, OverflowOfTheSumOverRanksIsReported) {
  Patterns patterns(32);
  Partials<float> gradient(&patterns, 2, kElements);
  MakeOrdinary(&patterns, &gradient);
  gradient.values[0][77] = gradient.values[1][77] = 3e38f;
  std::vector<double> blocks;
  EXPECT_FALSE(Squares(DetectSimdLevel(), gradient, &blocks));
}

TEST(GradientNormTest, ClipFactorIsTheRule) {
  EXPECT_EQ(ClipFactor(2.0, 0.0), 1.0);  // No clipping.
  EXPECT_EQ(ClipFactor(0.0, 1.0), 1.0);
  EXPECT_EQ(ClipFactor(0.5, 1.0), 1.0);
  EXPECT_EQ(ClipFactor(1.0, 1.0),
            1.0 / (1.0 + 1e-6));  // At the bound PyTorch scales by a hair too.
  EXPECT_EQ(ClipFactor(4.0, 1.0), 1.0 / (4.0 + 1e-6));
  EXPECT_EQ(ClipFactor(std::numeric_limits<double>::infinity(), 1.0), 0.0);
  EXPECT_TRUE(std::isnan(ClipFactor(std::numeric_limits<double>::quiet_NaN(), 1.0)));
}

}  // namespace
}  // namespace oom
