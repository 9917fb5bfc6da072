// Raw state is a range of whole 4,096-blocks as it lies in the pools (runtime/optim/adamw.h):
// `weights` (BF16, or FP32 masters with precision float32) and `rest` (moments and low bits by
// block). Here it is turned into FP32 masters and moments, and back. Stateless; thread-safe on
// disjoint ranges.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/model/description.h"

namespace oom {

// Twelve bytes a parameter in either precision.
inline constexpr int64_t kStateBytesPerElement = 12;

// Where raw state lies. `elements` is a multiple of kBlockElements.
struct StateBuffer {
  std::byte* weights = nullptr;  // elements * WeightBytesPerElement()
  std::byte* rest = nullptr;     // elements * (12 - WeightBytesPerElement())
  int64_t elements = 0;
};

int64_t WeightBytesPerElement(Precision precision);

// The state of `bytes.size() / 12` elements laid out in `bytes`: all weights, then the rest.
StateBuffer PlaceState(Precision precision, int64_t elements, std::span<std::byte> bytes);

// FP32 state of elements [first, first + masters.size()) of `state`.
// REQUIRES: whole blocks; three spans of one size; weights and rest aligned to 4 bytes.
void RawToFloat(Precision precision, const StateBuffer& state, int64_t first_element,
                std::span<float> masters, std::span<float> moment1, std::span<float> moment2);
void FloatToRaw(Precision precision, std::span<const float> masters, std::span<const float> moment1,
                std::span<const float> moment2, int64_t first_element, const StateBuffer& state);

}  // namespace oom
