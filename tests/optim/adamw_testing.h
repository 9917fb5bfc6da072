// What the tests of runtime/optim share: adversarial bit patterns and buffers laid out as the
// contract says.

#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "runtime/optim/adamw.h"

namespace oom {

inline constexpr int64_t kTestBlockElements = 4096;

// Skips, with the reason, where this CPU (or OOM_SIMD) does not offer the level.
#define OOM_SKIP_WITHOUT(level)                                                     \
  if ((level) > DetectSimdLevel()) {                                                \
    GTEST_SKIP() << "needs " << SimdLevelName(level) << ", the best level here is " \
                 << SimdLevelName(DetectSimdLevel());                               \
  }                                                                                 \
  static_assert(true)

// Bit patterns that sit where an implementation can go wrong, mixed with ordinary ones.
class Patterns {
 public:
  explicit Patterns(uint64_t seed) : random_(seed) {}

  uint32_t Bits() { return static_cast<uint32_t>(random_()); }

  float Float() {
    const uint32_t sign = Bits() & 0x80000000u;
    switch (Bits() % 10) {
      case 0:
        return std::bit_cast<float>(Bits());  // Anything, NaN payloads included.
      case 1:
        return std::bit_cast<float>(sign | (Bits() & 0x007FFFFFu));  // Zero or denormal.
      case 2:
        return std::bit_cast<float>(sign);
      case 3: {  // Within two units of one of the thresholds.
        const uint32_t exponent = (Bits() & 1u) ? 127 - 56 : 127 - 100;
        return std::bit_cast<float>(sign | ((exponent << 23) + Bits() % 5 - 2));
      }
      case 4:  // On or beside a tie of the rounding to 16 bits.
        return std::bit_cast<float>(sign | (0x30007FFFu + (Bits() & 0x1FFF0000u) + Bits() % 3));
      case 5:
        return std::bit_cast<float>(sign |
                                    (0x7F000000u + Bits() % 0x00800002u));  // Huge, infinite, NaN.
      default:
        return std::bit_cast<float>(sign | (0x35000000u + (Bits() & 0x0BFFFFFFu)));  // 5e-7 to 4e3.
    }
  }
  float Ordinary() { return std::normal_distribution<float>()(random_); }

 private:
  std::mt19937_64 random_;
};

// Weights, moments and gradients of whole blocks, in both layouts. Equality is of bits.
struct SplitBuffers {
  explicit SplitBuffers(int64_t blocks)
      : weight(blocks * kTestBlockElements), rest(blocks * kSplitRestBytesPerBlock / 4) {}

  SplitState At(int64_t element) {
    const int64_t block = element / kTestBlockElements;
    return {.weight = weight.data() + element,
            .rest = reinterpret_cast<std::byte*>(rest.data()) + block * kSplitRestBytesPerBlock,
            .first_in_block = element % kTestBlockElements};
  }
  float* Moment1(int64_t i) { return Block(i) + i % kTestBlockElements; }
  float* Moment2(int64_t i) { return Moment1(i) + kTestBlockElements; }
  int16_t* Low(int64_t i) {
    return reinterpret_cast<int16_t*>(Block(i) + 2 * kTestBlockElements) + i % kTestBlockElements;
  }
  float Master(int64_t i) {
    float master;
    JoinMasters(&weight[i], Low(i), {&master, 1});
    return master;
  }
  void SetMaster(int64_t i, float master) { SplitMasters({&master, 1}, &weight[i], Low(i)); }

  std::vector<uint16_t> weight;
  std::vector<float> rest;

 private:
  float* Block(int64_t i) {
    return rest.data() + i / kTestBlockElements * (kSplitRestBytesPerBlock / 4);
  }
};

struct MasterBuffers {
  explicit MasterBuffers(int64_t blocks)
      : master(blocks * kTestBlockElements), rest(blocks * kMasterRestBytesPerBlock / 4) {}

  MasterState At(int64_t element) {
    const int64_t block = element / kTestBlockElements;
    return {.master = master.data() + element,
            .rest = reinterpret_cast<std::byte*>(rest.data()) + block * kMasterRestBytesPerBlock,
            .first_in_block = element % kTestBlockElements};
  }
  float* Moment1(int64_t i) {
    return rest.data() + i / kTestBlockElements * (kMasterRestBytesPerBlock / 4) +
           i % kTestBlockElements;
  }
  float* Moment2(int64_t i) { return Moment1(i) + kTestBlockElements; }
  float Master(int64_t i) { return master[i]; }
  void SetMaster(int64_t i, float value) { master[i] = value; }

  std::vector<float> master;
  std::vector<float> rest;
};

template <class T>
bool SameBytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
inline bool SameBits(SplitBuffers& a, SplitBuffers& b) {
  return SameBytes(a.weight, b.weight) && SameBytes(a.rest, b.rest);
}
inline bool SameBits(MasterBuffers& a, MasterBuffers& b) {
  return SameBytes(a.master, b.master) && SameBytes(a.rest, b.rest);
}

template <class Buffers>
void FillWithPatterns(Patterns* patterns, Buffers* buffers, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    buffers->SetMaster(i, patterns->Float());
    *buffers->Moment1(i) = patterns->Float();
    // Ordinary second moments are not negative; now and then one is, as nothing may depend on it.
    const float v = patterns->Float();
    *buffers->Moment2(i) = patterns->Bits() % 8 == 0
                               ? v
                               : std::bit_cast<float>(std::bit_cast<uint32_t>(v) & 0x7FFFFFFFu);
  }
}

// The partials of `ranks` ranks as arrays of T and as the pointers that an update takes.
template <class T>
struct Partials {
  Partials(Patterns* patterns, int ranks, int64_t elements) : values(ranks) {
    for (std::vector<T>& of_rank : values) {
      of_rank.resize(elements);
      for (T& value : of_rank) {
        if constexpr (sizeof(T) == 2) {
          value = static_cast<T>(std::bit_cast<uint32_t>(patterns->Float()) >> 16);
        } else {
          value = patterns->Float();
        }
      }
    }
  }
  std::vector<const T*> At(int64_t element) const {
    std::vector<const T*> pointers;
    for (const std::vector<T>& of_rank : values) pointers.push_back(of_rank.data() + element);
    return pointers;
  }
  std::vector<std::vector<T>> values;
};

template <class Buffers>
void Update(SimdLevel level, const AdamWScalars& scalars, const Partials<uint16_t>& gradient,
            Buffers* buffers, int64_t first, int64_t elements) {
  const auto ranks = gradient.At(first);
  AdamWUpdate(level, scalars, Bfloat16Partials{ranks}, buffers->At(first), elements);
}
template <class Buffers>
void Update(SimdLevel level, const AdamWScalars& scalars, const Partials<float>& gradient,
            Buffers* buffers, int64_t first, int64_t elements) {
  const auto ranks = gradient.At(first);
  AdamWUpdate(level, scalars, Float32Partials{ranks}, buffers->At(first), elements);
}

// Settings that reach every branch: an ordinary step, clipping, no decay, a late step, learning
// rate 0.
inline std::vector<AdamWScalars> ScalarsToTry() {
  const AdamWHyperparameters hyper{
      .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  const AdamWHyperparameters slow{
      .beta1 = 0.8, .beta2 = 0.999, .epsilon = 1e-6, .weight_decay = 0.01};
  return {MakeAdamWScalars(hyper, 3e-4, 1, true, 1.0), MakeAdamWScalars(hyper, 1e-3, 7, true, 0.37),
          MakeAdamWScalars(slow, 0.5, 3, false, 1.0),
          MakeAdamWScalars(slow, 1e-5, 100000, true, 1e-3),
          MakeAdamWScalars(hyper, 0.0, 2, true, 1.0)};
}

}  // namespace oom
