// The bits of an update depend on nothing but its inputs: not on the instruction set, not on how
// the work is cut into pieces.

#include "tests/optim/adamw_testing.h"

namespace oom {
namespace {

class SimdLevelTest : public testing::TestWithParam<SimdLevel> {};
INSTANTIATE_TEST_SUITE_P(Levels, SimdLevelTest,
                         testing::Values(SimdLevel::kScalar, SimdLevel::kAvx2, SimdLevel::kAvx512),
                         [](const auto& info) { return std::string(SimdLevelName(info.param)); });

template <class Buffers, class T>
void ExpectLevelEqualsScalar(SimdLevel level, uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  constexpr int64_t kBlocks = 2;
  constexpr int64_t kElements = kBlocks * kTestBlockElements;
  Patterns patterns(seed);
  int setting = 0;
  for (const AdamWScalars& scalars : ScalarsToTry()) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      Buffers expected(kBlocks);
      FillWithPatterns(&patterns, &expected, kElements);
      Buffers actual = expected;
      for (int step = 0; step < 2;
           ++step) {  // The second step starts from what the first one stored.
        const Partials<T> gradient(&patterns, ranks, kElements);
        Update(SimdLevel::kScalar, scalars, gradient, &expected, 0, kElements);
        Update(level, scalars, gradient, &actual, 0, kElements);
        ASSERT_TRUE(SameBits(expected, actual))
            << "setting " << setting << ", ranks " << ranks << ", step " << step;
      }
    }
    ++setting;
  }
}

// Goal: AVX2 and AVX-512 give the bits of the scalar version.
// Method: random and adversarial patterns in every input, all layouts, one to three ranks.
TEST_P(SimdLevelTest, UpdateIsBitEqualToScalarOnAdversarialPatterns) {
  OOM_SKIP_WITHOUT(GetParam());
  const ScopedOptimizerMxcsr mxcsr;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    ExpectLevelEqualsScalar<SplitBuffers, uint16_t>(GetParam(), seed);
    ExpectLevelEqualsScalar<SplitBuffers, float>(GetParam(), seed);
    ExpectLevelEqualsScalar<MasterBuffers, float>(GetParam(), seed);
  }
}

template <class Buffers, class T>
void ExpectPartitionDoesNotMatter(SimdLevel level, uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  constexpr int64_t kBlocks = 3;
  constexpr int64_t kElements = kBlocks * kTestBlockElements;
  Patterns patterns(seed);
  const AdamWScalars scalars = ScalarsToTry()[1];
  Buffers whole(kBlocks);
  FillWithPatterns(&patterns, &whole, kElements);
  Buffers pieces = whole;
  const Partials<T> gradient(&patterns, 2, kElements);
  Update(level, scalars, gradient, &whole, 0, kElements);
  for (int64_t first = 0; first < kElements;) {
    // From 16 elements to more than a block: pieces begin and end inside blocks and span them.
    const int64_t wanted = 16 * (1 + patterns.Bits() % (patterns.Bits() % 2 == 0 ? 8 : 400));
    const int64_t elements = std::min(wanted, kElements - first);
    Update(level, scalars, gradient, &pieces, first, elements);
    first += elements;
  }
  ASSERT_TRUE(SameBits(whole, pieces));
}

TEST_P(SimdLevelTest, UpdateDoesNotDependOnThePartitionOfTheWork) {
  OOM_SKIP_WITHOUT(GetParam());
  const ScopedOptimizerMxcsr mxcsr;
  for (uint64_t seed = 10; seed < 20; ++seed) {
    ExpectPartitionDoesNotMatter<SplitBuffers, uint16_t>(GetParam(), seed);
    ExpectPartitionDoesNotMatter<SplitBuffers, float>(GetParam(), seed);
    ExpectPartitionDoesNotMatter<MasterBuffers, float>(GetParam(), seed);
  }
}

// Goal: an update writes its own elements and no others.
TEST_P(SimdLevelTest, UpdateLeavesItsNeighboursAlone) {
  OOM_SKIP_WITHOUT(GetParam());
  Patterns patterns(30);
  const AdamWScalars scalars = ScalarsToTry()[0];
  SplitBuffers before(2);
  FillWithPatterns(&patterns, &before, 2 * kTestBlockElements);
  SplitBuffers after = before;
  const Partials<uint16_t> gradient(&patterns, 1, 2 * kTestBlockElements);
  const int64_t first = 4000, end = 4000 + 160;  // Across the boundary at 4,096.
  Update(GetParam(), scalars, gradient, &after, first, end - first);
  int64_t changed = 0;
  for (int64_t i = 0; i < 2 * kTestBlockElements; ++i) {
    const bool same = before.weight[i] == after.weight[i] && *before.Low(i) == *after.Low(i) &&
                      std::memcmp(before.Moment1(i), after.Moment1(i), 4) == 0 &&
                      std::memcmp(before.Moment2(i), after.Moment2(i), 4) == 0;
    if (i < first || i >= end) {
      ASSERT_TRUE(same) << i;
    } else {
      changed += same ? 0 : 1;
    }
  }
  EXPECT_GT(changed, (end - first) / 2);
}

// Goal: both layouts and both gradient types are one rule.
// Method: a BF16 gradient widened to FP32 into split state and into FP32 masters.
TEST_P(SimdLevelTest, LayoutsAndGradientTypesAgree) {
  OOM_SKIP_WITHOUT(GetParam());
  constexpr int64_t kElements = kTestBlockElements;
  Patterns patterns(40);
  SplitBuffers split(1);
  FillWithPatterns(&patterns, &split, kElements);
  SplitBuffers split_from_float = split;
  MasterBuffers master(1);
  for (int64_t i = 0; i < kElements; ++i) {
    master.SetMaster(i, split.Master(i));
    *master.Moment1(i) = *split.Moment1(i);
    *master.Moment2(i) = *split.Moment2(i);
  }
  const Partials<uint16_t> gradient(&patterns, 2, kElements);
  Partials<float> widened(&patterns, 2, kElements);
  for (int rank = 0; rank < 2; ++rank) {
    for (int64_t i = 0; i < kElements; ++i) {
      widened.values[rank][i] =
          std::bit_cast<float>(static_cast<uint32_t>(gradient.values[rank][i]) << 16);
    }
  }
  const AdamWScalars scalars = ScalarsToTry()[0];
  Update(GetParam(), scalars, gradient, &split, 0, kElements);
  Update(GetParam(), scalars, widened, &split_from_float, 0, kElements);
  Update(GetParam(), scalars, widened, &master, 0, kElements);
  EXPECT_TRUE(SameBits(split, split_from_float));
  for (int64_t i = 0; i < kElements; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(split.Master(i)), std::bit_cast<uint32_t>(master.Master(i)))
        << i;
    ASSERT_EQ(std::memcmp(split.Moment1(i), master.Moment1(i), 4), 0) << i;
    ASSERT_EQ(std::memcmp(split.Moment2(i), master.Moment2(i), 4), 0) << i;
  }
}

// Goal: at learning rate 0 the weights keep every bit, -0.0 and NaN payloads included; moments move
// on.
TEST_P(SimdLevelTest, LearningRateZeroChangesNoWeight) {
  OOM_SKIP_WITHOUT(GetParam());
  constexpr int64_t kElements = kTestBlockElements;
  const AdamWScalars scalars = MakeAdamWScalars({.weight_decay = 0.1}, 0.0, 5, true, 0.5);
  Patterns patterns(50);
  MasterBuffers master(1);
  FillWithPatterns(&patterns, &master, kElements);
  SplitBuffers split(1);
  for (int64_t i = 0; i < kElements; ++i) {  // Any pair of halves, as an import may have stored it.
    split.weight[i] = static_cast<uint16_t>(patterns.Bits());
    *split.Low(i) = static_cast<int16_t>(patterns.Bits());
    *split.Moment1(i) = patterns.Float();
    *split.Moment2(i) = patterns.Float();
  }
  for (int64_t i = 0; i < kElements; i += 3) {
    split.weight[i] = 0x8000;
    *split.Low(i) = 0;
    master.SetMaster(i, -0.0f);
  }
  SplitBuffers split_before = split;
  const MasterBuffers master_before = master;
  Update(GetParam(), scalars, Partials<uint16_t>(&patterns, 2, kElements), &split, 0, kElements);
  Update(GetParam(), scalars, Partials<float>(&patterns, 2, kElements), &master, 0, kElements);
  EXPECT_TRUE(SameBytes(split.weight, split_before.weight));
  for (int64_t i = 0; i < kElements; ++i) ASSERT_EQ(*split.Low(i), *split_before.Low(i)) << i;
  EXPECT_TRUE(SameBytes(master.master, master_before.master));
  EXPECT_FALSE(SameBytes(split.rest, split_before.rest));
  EXPECT_FALSE(SameBytes(master.rest, master_before.rest));
}

// Goal: padding (weight, gradient and moments 0) stays zero for ever, with a positive sign.
TEST_P(SimdLevelTest, PaddingStaysPositiveZero) {
  OOM_SKIP_WITHOUT(GetParam());
  SplitBuffers split(1);
  SplitBuffers zeros(1);
  const std::vector<uint16_t> gradient(kTestBlockElements, 0);
  const uint16_t* const ranks[] = {gradient.data()};
  for (int step = 1; step <= 20; ++step) {
    AdamWUpdate(GetParam(), MakeAdamWScalars({.weight_decay = 0.1}, 1e-3, step, true, 1.0),
                Bfloat16Partials{ranks}, split.At(0), kTestBlockElements);
  }
  EXPECT_TRUE(SameBits(split, zeros));
}

}  // namespace
}  // namespace oom
