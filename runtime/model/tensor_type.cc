#include "runtime/model/tensor_type.h"

#include <array>
#include <bit>
#include <cstring>

#include "runtime/base/check.h"

namespace oom {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

struct TypeRow {
  TensorType type;
  std::string_view name;
  int64_t bytes;
};

// In the order of the enumeration.
constexpr std::array<TypeRow, 17> kTypes = {{
    {TensorType::kBool, "BOOL", 1},
    {TensorType::kU8, "U8", 1},
    {TensorType::kI8, "I8", 1},
    {TensorType::kF8E4M3, "F8_E4M3", 1},
    {TensorType::kF8E5M2, "F8_E5M2", 1},
    {TensorType::kF8E8M0, "F8_E8M0", 1},
    {TensorType::kU16, "U16", 2},
    {TensorType::kI16, "I16", 2},
    {TensorType::kF16, "F16", 2},
    {TensorType::kBF16, "BF16", 2},
    {TensorType::kU32, "U32", 4},
    {TensorType::kI32, "I32", 4},
    {TensorType::kF32, "F32", 4},
    {TensorType::kU64, "U64", 8},
    {TensorType::kI64, "I64", 8},
    {TensorType::kF64, "F64", 8},
    {TensorType::kC64, "C64", 8},
}};

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kInfinity = 0x7F800000u;

}  // namespace

std::string_view TensorTypeName(TensorType type) { return kTypes[static_cast<size_t>(type)].name; }

std::optional<TensorType> TensorTypeFromName(std::string_view name) {
  for (const TypeRow& row : kTypes) {
    if (row.name == name) return row.type;
  }
  return std::nullopt;
}

int64_t TensorTypeBytes(TensorType type) { return kTypes[static_cast<size_t>(type)].bytes; }

bool IsTrainableType(TensorType type) {
  return type == TensorType::kBF16 || type == TensorType::kF16 || type == TensorType::kF32;
}

uint16_t FloatBitsToBfloat16(uint32_t bits) {
  if ((bits & ~kSignBit) > kInfinity) {
    // A NaN keeps its upper half; one whose payload is in the lower half alone must not become
    // infinity.
    const uint32_t upper = bits >> 16;
    return static_cast<uint16_t>((upper & 0x7Fu) != 0 ? upper : upper | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x8000u) >> 16);
}

uint32_t HalfToFloatBits(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu;
  const uint32_t fraction = half & 0x3FFu;
  if (exponent == 0x1F) return sign | kInfinity | (fraction << 13);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (fraction << 13);
  // Zero or denormal: fraction * 2^-24, exact in FP32.
  const float value = static_cast<float>(fraction) * 0x1p-24f;
  return sign | std::bit_cast<uint32_t>(value);
}

uint16_t FloatBitsToHalf(uint32_t bits) {
  const uint32_t sign = (bits & kSignBit) >> 16;
  const uint32_t magnitude = bits & ~kSignBit;
  if (magnitude > kInfinity) {
    const uint32_t fraction = (magnitude >> 13) & 0x3FFu;
    return static_cast<uint16_t>(sign | 0x7C00u | (fraction != 0 ? fraction : 0x200u));
  }
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // >= 65536
  if (magnitude >= 0x38800000u) {  // >= 2^-14: a normal half, or a carry into infinity.
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Denormal half: a multiple of 2^-24. Adding 0.5 makes the FPU round at exactly that bit.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
}

void ConvertToFloat(TensorType type, std::span<const std::byte> in, std::span<float> out) {
  OOM_CHECK(IsTrainableType(type));
  OOM_CHECK(in.size() == out.size() * static_cast<size_t>(TensorTypeBytes(type)));
  if (in.empty()) return;
  if (type == TensorType::kF32) {
    std::memcpy(out.data(), in.data(), in.size());
    return;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t value;
    std::memcpy(&value, in.data() + 2 * i, 2);
    const uint32_t bits =
        type == TensorType::kBF16 ? static_cast<uint32_t>(value) << 16 : HalfToFloatBits(value);
    std::memcpy(&out[i], &bits, 4);  // A float assignment could quieten a signalling NaN.
  }
}

int64_t ConvertFromFloat(TensorType type, std::span<const float> in, std::span<std::byte> out) {
  OOM_CHECK(IsTrainableType(type));
  OOM_CHECK(out.size() == in.size() * static_cast<size_t>(TensorTypeBytes(type)));
  if (in.empty()) return -1;
  if (type == TensorType::kF32) {
    std::memcpy(out.data(), in.data(), out.size());
    return -1;
  }
  int64_t overflow_index = -1;
  for (size_t i = 0; i < in.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &in[i], 4);
    uint16_t value;
    if (type == TensorType::kBF16) {
      value = FloatBitsToBfloat16(bits);
    } else {
      value = FloatBitsToHalf(bits);
      const bool overflow = (value & 0x7FFFu) == 0x7C00u && (bits & ~kSignBit) != kInfinity;
      if (overflow && overflow_index < 0) overflow_index = static_cast<int64_t>(i);
    }
    std::memcpy(out.data() + 2 * i, &value, 2);
  }
  return overflow_index;
}

}  // namespace oom
