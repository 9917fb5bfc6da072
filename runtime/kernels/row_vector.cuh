// Rows of activations as 16-byte vectors, or as single elements where a row is not made of whole,
// aligned vectors. Device code of the row kernels; arithmetic is FP32.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace oom {

__device__ inline float ToFloat(float value) { return value; }
__device__ inline float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T RoundTo(float value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
  } else {
    return __float2bfloat16_rn(value);
  }
}

// kCount elements of a row, read and written at once. Kept as words: a vector in flight should take
// as many registers as it has words, not as many as it has elements.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) RowVector {
  uint32_t words[kCount * sizeof(T) / sizeof(uint32_t)];

  __device__ float Get(int i) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      return __uint_as_float(words[i]);
    } else {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    }
  }

  // Rounds kCount values.
  __device__ void Set(const float* values) {
    if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint32_t low = __bfloat16_as_ushort(__float2bfloat16_rn(values[i]));
        const uint32_t high = __bfloat16_as_ushort(__float2bfloat16_rn(values[i + 1]));
        words[i / 2] = low | high << 16;
      }
    }
  }
};

template <>
struct RowVector<__nv_bfloat16, 1> {
  __nv_bfloat16 element;

  __device__ float Get(int) const { return ToFloat(element); }
  __device__ void Set(const float* value) { element = __float2bfloat16_rn(*value); }
};

// Elements of T in 16 bytes.
template <class T>
inline constexpr int kWholeVector = 16 / static_cast<int>(sizeof(T));

// Whether rows of `row_bytes` bytes can be read and written as 16-byte vectors.
template <class... Pointer>
bool WholeVectors(int64_t row_bytes, const Pointer*... pointers) {
  return row_bytes % 16 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace oom
