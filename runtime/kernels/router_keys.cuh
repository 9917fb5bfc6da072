// A token's logits as integers that order as the router chooses: the larger logit first, of equal
// logits the lower expert. Every key of a token is different, NaNs included, so that the largest
// key is one choice; it holds both its logit and its expert.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace oom {

// The logit's bits above 16 bits of expert; 0 is no expert.
template <class T>
using RouterKey = std::conditional_t<sizeof(T) == 2, uint32_t, unsigned long long>;

template <class T>
__device__ RouterKey<T> KeyOf(float logit, int expert) {
  uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 equals 0.
  // Negative numbers, whose bits order the other way, are turned round and come below the others.
  bits ^= static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  const uint32_t low = 0xffffu - static_cast<uint32_t>(expert);
  if constexpr (sizeof(T) == 2) {
    return (bits & 0xffff0000u) | low;
  } else {
    return static_cast<RouterKey<T>>(bits) << 16 | low;
  }
}

template <class T>
__device__ float LogitOf(RouterKey<T> key) {
  uint32_t bits = static_cast<uint32_t>(sizeof(T) == 2 ? key : key >> 16);
  bits = (bits & 0x80000000u) != 0 ? bits ^ 0x80000000u : ~bits;
  return __uint_as_float(sizeof(T) == 2 ? bits & 0xffff0000u : bits);
}

template <class Key>
__device__ int ExpertOf(Key key) {
  return static_cast<int>(0xffffu - (static_cast<uint32_t>(key) & 0xffffu));
}

// Falling, in registers: Batcher's odd-even merge sort.
template <class Key, int kCount>
__device__ void SortKeys(Key (&key)[kCount]) {
#pragma unroll
  for (int sorted = 1; sorted < kCount; sorted *= 2) {
#pragma unroll
    for (int distance = sorted; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kCount - distance; ++i) {
        const int block = (i - distance % sorted) / distance;
        const bool compared = i >= distance % sorted && block % 2 == 0 &&
                              i / (2 * sorted) == (i + distance) / (2 * sorted);
        if (compared) {
          const Key a = key[i];
          const Key b = key[i + distance];
          key[i] = a > b ? a : b;
          key[i + distance] = a > b ? b : a;
        }
      }
    }
  }
}

}  // namespace oom
