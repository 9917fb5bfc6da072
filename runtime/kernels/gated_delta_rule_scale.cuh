// The power of two that backward of the gated delta rule multiplies the gradients of a key head's
// value heads with, so that FP16 holds them: the greatest becomes 4 to 8. Between that and the
// least number of full precision there are 16 powers of two, and 13 between it and the greatest
// number, for what adds up over tokens. One for all value heads of a key head, since dq and dk are
// their sums. Device code, internal to this folder.

#pragma once

#include <cstdint>

namespace oom::internal {

// `magnitude`: the bits of the greatest |gradient|; 0 where all are zero.
__device__ __forceinline__ float GradientScale(uint32_t magnitude) {
  if (magnitude == 0) return 1.0f;
  const int exponent = 2 - (static_cast<int>(magnitude >> 23) - 127);
  // Both it and its reciprocal are to be normal numbers.
  const int bounded = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
  return __uint_as_float(static_cast<uint32_t>(bounded + 127) << 23);
}

}  // namespace oom::internal
