// A router's rows on the device: how a token's experts lie in a warp, and the softmax over them.
// Device code of the router's kernels; every lane of a warp calls these functions.

#pragma once

#include <cmath>
#include <cstdint>

#include "runtime/kernels/row_vector.cuh"

namespace oom {

inline constexpr int kRouterThreads = 256;
inline constexpr unsigned kWholeWarp = 0xffffffffu;

// How a token's experts lie in a warp: `kLanes` neighbouring lanes hold kValues consecutive experts
// each. Several tokens share a warp where there are few experts. A block's tokens depend on the
// layout alone, so that sums over tokens do not depend on the machine.
template <int kLanesArg, int kValuesArg>
struct RouterLayout {
  static constexpr int kLanes = kLanesArg;
  static constexpr int kValues = kValuesArg;
  static constexpr int kGroups = kRouterThreads / kLanes;  // Tokens at a time.
  static constexpr int kTokens = kGroups < 64 ? 64 : kGroups;
};

template <class Visit>
void WithRouterLayout(int expert_count, const Visit& visit) {
  if (expert_count <= 8) {
    visit(RouterLayout<1, 8>());
  } else if (expert_count <= 16) {
    visit(RouterLayout<2, 8>());
  } else if (expert_count <= 32) {
    visit(RouterLayout<4, 8>());
  } else if (expert_count <= 64) {
    visit(RouterLayout<8, 8>());
  } else if (expert_count <= 128) {
    visit(RouterLayout<16, 8>());
  } else if (expert_count <= 256) {
    visit(RouterLayout<32, 8>());
  } else {
    visit(RouterLayout<32, 16>());
  }
}

template <int kLanes>
__device__ float GroupSum(float value) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, lanes);
  }
  return value;
}

__device__ inline float Larger(float a, float b) { return fmaxf(a, b); }
template <class Key>
__device__ Key Larger(Key a, Key b) {
  return a > b ? a : b;
}

template <int kLanes, class Value>
__device__ Value GroupMax(Value value) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value = Larger(value, __shfl_xor_sync(kWholeWarp, value, lanes));
  }
  return value;
}

// Experts first, first + 1, ... of a row, `other` beyond the last one. `whole`: the row is made of
// aligned groups of eight experts.
template <int kValues, class T>
__device__ void LoadExperts(const T* row_E, int first, int experts, bool whole, float other,
                            float (&value)[kValues]) {
  constexpr int kVector = kWholeVector<T>;
  if (whole) {
#pragma unroll
    for (int v = 0; v < kValues; v += kVector) {
      if (first + v < experts) {
        const auto vector = *reinterpret_cast<const RowVector<T, kVector>*>(row_E + first + v);
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[v + i] = vector.Get(i);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[v + i] = other;
      }
    }
  } else {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      value[v] = first + v < experts ? ToFloat(row_E[first + v]) : other;
    }
  }
}

template <int kValues, class T>
__device__ void StoreExperts(T* row_E, int first, int experts, bool whole,
                             const float (&value)[kValues]) {
  constexpr int kVector = kWholeVector<T>;
  if (whole) {
#pragma unroll
    for (int v = 0; v < kValues; v += kVector) {
      if (first + v < experts) {
        RowVector<T, kVector> vector;
        vector.Set(value + v);
        *reinterpret_cast<RowVector<T, kVector>*>(row_E + first + v) = vector;
      }
    }
  } else {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (first + v < experts) row_E[first + v] = RoundTo<T>(value[v]);
    }
  }
}

// p_e = exp(z_e - most) / sum.
struct Softmax {
  float most;
  float sum;

  __device__ float Probability(float logit) const { return __fdiv_rn(expf(logit - most), sum); }
};

// Over the kLanes lanes of a token; turns logits into exp(z_e - most). Logits beyond the last
// expert are -infinity.
template <int kLanes, int kValues>
__device__ Softmax Exponentials(float (&value)[kValues]) {
  float most = value[0];
#pragma unroll
  for (int v = 1; v < kValues; ++v) most = fmaxf(most, value[v]);
  most = GroupMax<kLanes>(most);
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    value[v] = expf(value[v] - most);
    sum += value[v];
  }
  return {.most = most, .sum = GroupSum<kLanes>(sum)};
}

}  // namespace oom
