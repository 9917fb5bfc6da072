// The update, one parameter at a time: the reference of the other versions, and what runs on a CPU
// without AVX2. std::fma is correctly rounded with and without FMA hardware.

#include <bit>
#include <cmath>

#include "runtime/optim/adamw_step.h"

namespace oom::internal {
namespace {

struct ScalarLanes {
  static constexpr int64_t kWidth = 1;
  using F = float;

  static F Broadcast(float x) { return x; }
  static F Load(const float* from) { return *from; }
  static void Store(float* to, F x) { *to = x; }
  static F LoadBfloat16(const uint16_t* from) {
    return std::bit_cast<float>(static_cast<uint32_t>(*from) << 16);
  }
  static F Add(F a, F b) { return a + b; }
  static F Multiply(F a, F b) { return a * b; }
  static F Fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F NegativeFma(F a, F b, F c) { return std::fma(-a, b, c); }
  static F Divide(F a, F b) { return a / b; }
  static F SquareRoot(F x) { return std::sqrt(x); }
  static F ZeroIfSmall(F x, int32_t bits) {
    const auto magnitude = static_cast<int32_t>(std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu);
    return magnitude < bits ? 0.0f : x;
  }
  static F ZeroIfLess(F x, F y) { return x < y ? 0.0f : x; }
  static bool AnyNan(F x) { return (std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu) > 0x7F800000u; }
  static F CanonicalNan(F x) { return AnyNan(x) ? std::bit_cast<float>(kCanonicalNanBits) : x; }
  static F LoadMaster(const uint16_t* weight, const int16_t* weight_low) {
    return std::bit_cast<float>((static_cast<uint32_t>(*weight) << 16) +
                                static_cast<uint32_t>(static_cast<int32_t>(*weight_low)));
  }
  static void StoreMaster(F x, uint16_t* weight, int16_t* weight_low) {
    const auto bits = std::bit_cast<uint32_t>(x);
    *weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    // weight << 16 ends in 16 zeros, so the difference modulo 2^16 is the low half itself.
    *weight_low = static_cast<int16_t>(static_cast<uint16_t>(bits));
  }

  struct SquareSum {
    double lanes[kSquareLanes] = {};
    void Add(F x, int64_t i) { lanes[i % kSquareLanes] += static_cast<double>(x) * x; }
    void Store(double* to) const {
      for (int lane = 0; lane < kSquareLanes; ++lane) to[lane] = lanes[lane];
    }
  };
};

}  // namespace

constinit const AdamWKernels kScalarKernels = MakeKernels<ScalarLanes>();

}  // namespace oom::internal
