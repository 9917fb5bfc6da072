// Conversions between the forms of a value: plain loops that the compiler vectorises on the
// baseline.

#include <bit>

#include "runtime/optim/adamw.h"

namespace oom {
namespace {

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kCanonicalNanBits = 0x7FC00000u;

bool IsNan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > kInfinityBits; }

}  // namespace

void SplitMasters(std::span<const float> masters, uint16_t* weight, int16_t* weight_low) {
  const float* const from = masters.data();
  const size_t count = masters.size();
  for (size_t i = 0; i < count; ++i) {
    const auto raw = std::bit_cast<uint32_t>(from[i]);
    const uint32_t bits = IsNan(raw) ? kCanonicalNanBits : raw;
    weight[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    weight_low[i] = static_cast<int16_t>(static_cast<uint16_t>(bits));
  }
}

void JoinMasters(const uint16_t* weight, const int16_t* weight_low, std::span<float> masters) {
  float* const to = masters.data();
  const size_t count = masters.size();
  for (size_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>((static_cast<uint32_t>(weight[i]) << 16) +
                                 static_cast<uint32_t>(static_cast<int32_t>(weight_low[i])));
  }
}

void RoundToBfloat16(std::span<const float> values, uint16_t* out) {
  const float* const from = values.data();
  const size_t count = values.size();
  for (size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    out[i] = static_cast<uint16_t>(IsNan(bits) ? quiet : rounded);
  }
}

void AccumulateFloat32(std::span<const float> values, float* accumulator) {
  const float* const from = values.data();
  const size_t count = values.size();
  for (size_t i = 0; i < count; ++i) accumulator[i] += from[i];
}

}  // namespace oom
