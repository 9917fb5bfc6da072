// Element types of safetensors files and the conversions between them and FP32. A conversion works
// on bit patterns, so that -0.0 and the bits of NaNs survive. Pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "runtime/base/status.h"

namespace oom {

enum class TensorType {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kC64,
};

// "BF16" and so on, as the format spells them.
std::string_view TensorTypeName(TensorType type);
std::optional<TensorType> TensorTypeFromName(std::string_view name);
int64_t TensorTypeBytes(TensorType type);

// BF16, F16 and F32: the types that a master can be read from and written to.
bool IsTrainableType(TensorType type);

// Every value of the three types is an FP32 value, so this is exact (NaN payloads kept).
// REQUIRES: IsTrainableType(type), in.size() == out.size() * TensorTypeBytes(type).
void ConvertToFloat(TensorType type, std::span<const std::byte> in, std::span<float> out);

// BF16 rounds half away from zero (engine rules, section 1: the working weight of a master). F16
// rounds to nearest even. Neither alters a value that its type holds. Returns the index of the
// first finite value that F16 cannot hold (its rounding is an infinity), or -1. REQUIRES as above.
int64_t ConvertFromFloat(TensorType type, std::span<const float> in, std::span<std::byte> out);

// One value each, as bits.
uint16_t FloatBitsToBfloat16(uint32_t bits);
uint16_t FloatBitsToHalf(uint32_t bits);
uint32_t HalfToFloatBits(uint16_t half);

}  // namespace oom
