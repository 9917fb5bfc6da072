// Capped logits (runtime/ops/head_loss.h): z = C tanh(u / C) of a logit u, dz/du = 1 - (z / C)^2,
// as exact as exponential.cuh has exponentials for the type. Device code, internal to this folder.

#pragma once

#include <cmath>

#include "runtime/kernels/exponential.cuh"

namespace oom::internal {

// C = 0: no cap.
struct LogitCap {
  explicit LogitCap(float cap) : cap(cap), exponent(cap == 0.0f ? 0.0f : -2.0f * kLog2E / cap) {}

  float cap;
  float exponent;  // Of |u|, in exp(-2 |u| / C) as a power of two.
};

struct Logit {
  float value;  // z
  float slope;  // dz/du
};

template <class T, bool kCapped>
__device__ Logit LogitOf(float u, const LogitCap& cap) {
  if constexpr (!kCapped) {
    return {.value = u, .slope = 1.0f};
  } else if constexpr (sizeof(T) == 4) {
    const float share = tanhf(u / cap.cap);
    return {.value = cap.cap * share, .slope = 1.0f - share * share};
  } else {
    // With e = exp(-2 |u| / C) and q = 1 / (1 + e): tanh = (1 - e) q, its slope 4 e q^2. So nothing
    // overflows, and a slope next to zero is no difference of numbers next to one.
    const float e = ApproximateExp2(fabsf(u) * cap.exponent);
    const float q = ApproximateReciprocal(1.0f + e);
    return {.value = copysignf(cap.cap * ((1.0f - e) * q), u), .slope = 4.0f * e * (q * q)};
  }
}

}  // namespace oom::internal
