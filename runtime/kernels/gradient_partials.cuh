// The gradient that an update sees: the partials of all ranks, added in FP32 in rank order. Device
// code, internal to this folder.

#pragma once

#include <cstdint>
#include <span>

#include "runtime/base/check.h"
#include "runtime/kernels/gradient.h"
#include "runtime/kernels/packed.cuh"

namespace oom::internal {

inline constexpr int kBlockElements = 4096;

// uint16_t holds BF16. kRounds: FP32 that is rounded to BF16 before it is added.
template <class Element, bool kRounds>
struct PartialPointers {
  const Element* ranks[kMaxGradientRanks];
  int rank_count;
};

template <bool kRounds = false, class Element>
PartialPointers<Element, kRounds> PointersTo(std::span<const Element* const> ranks) {
  OOM_CHECK(!ranks.empty() && ranks.size() <= kMaxGradientRanks);
  PartialPointers<Element, kRounds> pointers = {};
  pointers.rank_count = static_cast<int>(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    OOM_CHECK(reinterpret_cast<uintptr_t>(ranks[rank]) % 16 == 0);
    pointers.ranks[rank] = ranks[rank];
  }
  return pointers;
}

// Bits of the nearest BF16, ties to even; of a NaN its upper half, made quiet.
__device__ inline uint32_t Bfloat16Bits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded;
}

template <bool kRounds, int kCount, class Element>
__device__ void LoadPartial(const Element* from, float (&values)[kCount]) {
  const Packed<Element, kCount> packed = Load<true, kCount>(from, kCount);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = kRounds ? __uint_as_float(Bfloat16Bits(packed.words[i]) << 16) : packed[i];
  }
}

// Elements [first, first + kCount) of the sum.
template <int kCount, class Element, bool kRounds>
__device__ void SumPartials(const PartialPointers<Element, kRounds>& partials, int64_t first,
                            float (&sum)[kCount]) {
  LoadPartial<kRounds>(partials.ranks[0] + first, sum);
  for (int rank = 1; rank < partials.rank_count; ++rank) {
    float values[kCount];
    LoadPartial<kRounds>(partials.ranks[rank] + first, values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = __fadd_rn(sum[i], values[i]);
  }
}

}  // namespace oom::internal
