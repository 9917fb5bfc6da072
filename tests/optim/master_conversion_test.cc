// Split and join of masters, the rounding of gradient partials, accumulation.

#include <cmath>

#include "tests/optim/adamw_testing.h"

namespace oom {
namespace {

bool IsNan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }
float FloatOf(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }

// Goal: join, then split is the identity on every pair of halves whose master is a number.
// Method: all 2^16 weights with the edges of the low half and random ones.
TEST(MasterConversionTest, EveryPairOfHalvesSurvivesJoinAndSplit) {
  Patterns patterns(1);
  std::vector<int16_t> lows = {-32768, -32767, -1, 0, 1, 255, 32766, 32767};
  for (int i = 0; i < 24; ++i) lows.push_back(static_cast<int16_t>(patterns.Bits()));
  std::vector<uint16_t> weight(65536), weight_again(65536);
  std::vector<int16_t> low(65536), low_again(65536);
  std::vector<float> masters(65536);
  for (const int16_t a_low : lows) {
    for (int i = 0; i < 65536; ++i) {
      weight[i] = static_cast<uint16_t>(i);
      low[i] = a_low;
    }
    JoinMasters(weight.data(), low.data(), masters);
    SplitMasters(masters, weight_again.data(), low_again.data());
    for (int i = 0; i < 65536; ++i) {
      const uint32_t bits =
          (static_cast<uint32_t>(i) << 16) + static_cast<uint32_t>(int32_t{a_low});
      ASSERT_EQ(BitsOf(masters[i]), bits);
      ASSERT_EQ(weight_again[i], IsNan(bits) ? 0x7FC0u : weight[i]) << i << " " << a_low;
      ASSERT_EQ(low_again[i], IsNan(bits) ? 0 : a_low) << i << " " << a_low;
    }
  }
}

TEST(MasterConversionTest, EveryMasterSurvivesSplitAndJoin) {
  Patterns patterns(2);
  std::vector<float> masters = {0.0f,
                                -0.0f,
                                1.0f,
                                -1.0f,
                                INFINITY,
                                -INFINITY,
                                FloatOf(1),
                                FloatOf(0x80000001u),
                                FloatOf(0x7F7FFFFFu),
                                FloatOf(0x7F7F8000u),
                                FloatOf(0x7FFFFFFFu),
                                FloatOf(0xFFFFFFFFu),
                                FloatOf(0x7FFF8000u)};
  while (masters.size() < 200000) {
    masters.push_back(masters.size() % 2 == 0 ? FloatOf(patterns.Bits()) : patterns.Float());
  }
  std::vector<uint16_t> weight(masters.size());
  std::vector<int16_t> low(masters.size());
  std::vector<float> again(masters.size());
  SplitMasters(masters, weight.data(), low.data());
  JoinMasters(weight.data(), low.data(), again);
  for (size_t i = 0; i < masters.size(); ++i) {
    const uint32_t bits = BitsOf(masters[i]);
    ASSERT_EQ(BitsOf(again[i]), IsNan(bits) ? 0x7FC00000u : bits) << i;
  }
}

// Goal: the weight that the device reads is the master rounded to nearest, ties away from zero.
TEST(MasterConversionTest, WeightIsTheMasterRoundedHalfAway) {
  Patterns patterns(3);
  for (int i = 0; i < 200000; ++i) {
    const float master = patterns.Float();
    if (!std::isfinite(master) || std::abs(master) > 1e38f) continue;
    uint16_t weight;
    int16_t low;
    SplitMasters({&master, 1}, &weight, &low);
    const double magnitude = std::abs(static_cast<double>(master));
    const uint32_t truncated = BitsOf(master) >> 16 & 0x7FFFu;
    const double below = FloatOf(truncated << 16), above = FloatOf((truncated + 1) << 16);
    const bool up = above - magnitude <= magnitude - below;
    ASSERT_EQ(weight & 0x7FFFu, truncated + (up ? 1 : 0)) << BitsOf(master);
    ASSERT_EQ(weight >> 15, BitsOf(master) >> 31);
  }
}

TEST(MasterConversionTest, PartialsAreRoundedToNearestEven) {
  for (const uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
    for (uint32_t high = 0; high < 65536; ++high) {
      const float value = FloatOf(high << 16 | low);
      uint16_t rounded;
      RoundToBfloat16({&value, 1}, &rounded);
      if (std::isnan(value)) {
        ASSERT_TRUE(IsNan(static_cast<uint32_t>(rounded) << 16)) << high;
        ASSERT_NE(rounded & 0x40u, 0u) << high;  // Quiet.
        continue;
      }
      const bool up = low > 0x8000u || (low == 0x8000u && (high & 1u) == 1);
      ASSERT_EQ(rounded, high + (up ? 1 : 0)) << high << " " << low;
    }
  }
}

TEST(MasterConversionTest, AccumulationIsAnFp32AddOfEachElement) {
  Patterns patterns(4);
  std::vector<float> values(1003), accumulator(1003);
  for (float& value : values) value = patterns.Ordinary();
  for (float& value : accumulator) value = patterns.Ordinary();
  const std::vector<float> before = accumulator;
  AccumulateFloat32(values, accumulator.data());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(accumulator[i],
              static_cast<float>(static_cast<double>(before[i]) + static_cast<double>(values[i])));
  }
}

}  // namespace
}  // namespace oom
