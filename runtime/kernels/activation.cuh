// The activations of gated MLPs and their derivatives, as exact as exponential.cuh has exponentials
// for the type. Both are a logistic away from the identity:
//   silu(x) = x s,  s = logistic(x);
//   gelu(x) = x/2 (1 + tanh u) = x s,  s = logistic(2u),  u = sqrt(2/pi) (x + 0.044715 x^3);
//   act'(x) = s (1 + x (1 - s) dv/dx),  where s = logistic(v).
// Device code, internal to this folder.

#pragma once

#include "runtime/kernels/exponential.cuh"
#include "runtime/model/description.h"

namespace oom::internal {

struct Activated {
  float value;     // act(x)
  float logistic;  // s
};

inline constexpr float kGeluSlope = 1.59576912160573071f;  // 2 sqrt(2/pi)
inline constexpr float kGeluCubic = 0.044715f;
// Further out gelu' is 0 or 1, and its cubic would only magnify what the logistic is off by.
inline constexpr float kGeluBound = 8.0f;

template <Activation kActivation, class T>
__device__ Activated ActivatedOf(float x) {
  if constexpr (kActivation == Activation::kSilu) {
    const Logistic logistic = LogisticOf<T>(x);
    return {.value = logistic.silu, .logistic = logistic.value};
  } else {
    const float s = LogisticOf<T>(kGeluSlope * (x + kGeluCubic * x * x * x)).value;
    return {.value = x * s, .logistic = s};
  }
}

// dact act'(x), of the logistic that ActivatedOf(x) gave.
template <Activation kActivation>
__device__ float ActivationGradient(float dact, float x, float s) {
  if constexpr (kActivation == Activation::kSilu) {
    return dact * s * (1.0f + x * (1.0f - s));
  } else {
    const float bounded = fminf(fmaxf(x, -kGeluBound), kGeluBound);
    const float slope = kGeluSlope * (1.0f + 3.0f * kGeluCubic * bounded * bounded);
    return dact * s * (1.0f + bounded * (1.0f - s) * slope);
  }
}

}  // namespace oom::internal
