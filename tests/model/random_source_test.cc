// Counter-based initialisation (engine rules, section 14).

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "runtime/model/hf_config.h"
#include "runtime/model/state_source.h"
#include "tests/model/model_testing.h"

namespace oom {
namespace {

using testing::SameBits;
using testing::TinyQwenConfig;
using testing::WithKey;

ModelDescription Wide() {
  return std::move(ParseHfConfig(WithKey(TinyQwenConfig(), "vocab_size", "50000"), "c")).value();
}

std::vector<float> ReadAll(const StateSource& source, const ParameterUnit& unit, int64_t tensor,
                           StateArray array = StateArray::kMaster) {
  std::vector<float> values(
      static_cast<size_t>(unit.tensors[static_cast<size_t>(tensor)].elements));
  EXPECT_TRUE(source.Read(unit.index, tensor, array, 0, values).ok());
  return values;
}

TEST(RandomSource, AnyRangeHasTheValuesOfTheWhole) {
  const ModelDescription model = Wide();
  const auto units = BuildUnits(model, 1);
  const auto source = MakeRandomSource(model, units, 3);
  const std::vector<float> whole = ReadAll(*source, units[0], 0);
  for (const int64_t first : {0, 1, 2, 4095, 4097}) {
    for (const size_t count : {0u, 1u, 2u, 3u, 1000u}) {
      std::vector<float> part(count);
      ASSERT_TRUE(source->Read(0, 0, StateArray::kMaster, first, part).ok());
      EXPECT_TRUE(SameBits(part, std::span(whole).subspan(static_cast<size_t>(first), count)))
          << first << " " << count;
    }
  }
}

TEST(RandomSource, DoesNotDependOnTheNumberOfRanks) {
  const ModelDescription model = Wide();
  const auto one = BuildUnits(model, 1);
  const auto eight = BuildUnits(model, 8);
  EXPECT_EQ(ReadAll(*MakeRandomSource(model, one, 3), one[2], 1),
            ReadAll(*MakeRandomSource(model, eight, 3), eight[2], 1));
}

// 1.2 million values: mean, deviation, fourth moment and neighbour correlation within five standard
// errors.
TEST(RandomSource, IsNormalWithTheModelsDeviation) {
  const ModelDescription model = Wide();
  const auto units = BuildUnits(model, 1);
  const std::vector<float> values = ReadAll(*MakeRandomSource(model, units, 3), units[0], 0);
  const double n = static_cast<double>(values.size());
  double sum = 0, squares = 0, fourth = 0, neighbours = 0, largest = 0;
  double last = 0;
  for (const float value : values) {
    const double z = value / model.initializer_range;
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
    neighbours += z * last;
    last = z;
    largest = std::max(largest, std::fabs(z));
  }
  EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(fourth / n, 3, 5 * std::sqrt(96 / n));
  EXPECT_NEAR(neighbours / n, 0, 5 / std::sqrt(n));
  EXPECT_GT(largest, 4.0);
  EXPECT_LT(largest, 8.7);
}

// Quantiles catch a wrong shape that the moments forgive.
TEST(RandomSource, HasTheNormalDistributionsQuantiles) {
  const ModelDescription model = Wide();
  const auto units = BuildUnits(model, 1);
  const std::vector<float> values = ReadAll(*MakeRandomSource(model, units, 9), units[0], 0);
  const double n = static_cast<double>(values.size());
  for (const double z : {-3.0, -1.5, -0.5, 0.0, 0.25, 1.0, 2.0, 3.5}) {
    double below = 0;
    for (const float value : values) below += value < z * model.initializer_range ? 1 : 0;
    const double expected = 0.5 * std::erfc(-z / std::sqrt(2.0));
    EXPECT_NEAR(below / n, expected, 5 * std::sqrt(expected * (1 - expected) / n)) << z;
  }
}

TEST(RandomSource, TensorsAndSeedsDiffer) {
  const ModelDescription model = Wide();
  const auto units = BuildUnits(model, 1);
  const auto a = MakeRandomSource(model, units, 3);
  const auto b = MakeRandomSource(model, units, 4);
  EXPECT_NE(ReadAll(*a, units[0], 0), ReadAll(*b, units[0], 0));
  const ParameterUnit& layer = units[1];
  EXPECT_NE(ReadAll(*a, layer, 2), ReadAll(*a, layer, 3));  // Key and value: the same shape.
}

TEST(RandomSource, NormsAreOneAndMomentsZero) {
  const ModelDescription model = Wide();
  const auto units = BuildUnits(model, 1);
  const auto source = MakeRandomSource(model, units, 3);
  EXPECT_EQ(source->step(), 0);
  EXPECT_EQ(units[1].tensors[0].role, TensorRole::kInputNorm);
  for (const float value : ReadAll(*source, units[1], 0)) EXPECT_EQ(value, 1.0f);
  for (const StateArray moment : {StateArray::kMoment1, StateArray::kMoment2}) {
    for (const float value : ReadAll(*source, units[1], 1, moment)) EXPECT_EQ(value, 0.0f);
  }
}

// Golden bits: another compiler, machine or optimisation level must give the same.
TEST(RandomSource, BitsAreTheSameOnEveryMachine) {
  const ModelDescription model = Wide();
  const auto units = BuildUnits(model, 1);
  const std::vector<float> values = ReadAll(*MakeRandomSource(model, units, 3), units[0], 0);
  uint64_t hash = 0xCBF29CE484222325u;
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    hash = (hash ^ bits) * 0x100000001B3u;
  }
  EXPECT_EQ(hash, 0x34436265D199F367u) << std::hex << hash;
}

}  // namespace
}  // namespace oom
