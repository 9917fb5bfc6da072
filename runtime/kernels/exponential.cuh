// Exponentials as exact as their use asks: where the result is rounded to BF16 (8 bits) the
// hardware's approximations (22 bits) do, and a kernel that is to be bound by memory needs them.
// FP32 results use the library's. Device code, internal to this folder.

#pragma once

#include <cuda_bf16.h>

namespace oom::internal {

inline constexpr float kLog2E = 1.44269504088896341f;

// 2^x, denormal results flushed to zero.
__device__ inline float ApproximateExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x; zero for |x| above 2^126.
__device__ inline float ApproximateReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Logistic {
  float value;  // 1 / (1 + exp(-x))
  float silu;   // x / (1 + exp(-x))
};

template <class T>
__device__ Logistic LogisticOf(float x) {
  if constexpr (sizeof(T) == 4) {
    const float divisor = 1.0f + expf(-x);
    return {.value = 1.0f / divisor, .silu = x / divisor};
  } else {
    const float value = ApproximateReciprocal(1.0f + ApproximateExp2(-kLog2E * x));
    return {.value = value, .silu = x * value};
  }
}

// Sums of exponentials below a base: the base is the greatest x, or for BF16 the whole power of two
// next to its exponential. So the subtraction is exact, which keeps large logits accurate, in one
// instruction with the product.
template <class T>
__device__ float BaseOf(float maximum) {
  return sizeof(T) == 4 ? maximum : rintf(maximum * kLog2E);
}

// exp(x) below the base. REQUIRES: the base is not -infinity.
template <class T>
__device__ float ExpBelow(float x, float base) {
  return sizeof(T) == 4 ? expf(x - base) : ApproximateExp2(fmaf(x, kLog2E, -base));
}

// What a sum below base `from` is multiplied with to be one below base `to`.
template <class T>
__device__ float Rebase(float from, float to) {
  return sizeof(T) == 4 ? expf(from - to) : ApproximateExp2(from - to);
}

// log(sum below base) - x. The constant's own error cancels: both terms carry it.
template <class T>
__device__ float LogSumMinus(float sum, float base, float x) {
  if constexpr (sizeof(T) == 4) {
    return logf(sum) + (base - x);
  } else {
    return (log2f(sum) + fmaf(-x, kLog2E, base)) * (1.0f / kLog2E);
  }
}

}  // namespace oom::internal
