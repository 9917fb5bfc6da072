// Goal: the update on the device has the bits of the scalar update on the CPU, in every stored
// byte. Method: random and adversarial patterns in every input (NaN payloads, denormals,
// infinities, ties, negative zeros, values beside the thresholds), all layouts and gradient types.

#include <gtest/gtest.h>

#include <limits>

#include "runtime/kernels/adamw.h"
#include "tests/gpu/elementwise/device_array.h"
#include "tests/optim/adamw_testing.h"

namespace oom::testing {
namespace {

constexpr int64_t kBlocks = 5;
constexpr int64_t kElements = kBlocks * kTestBlockElements;
// Weight decay by block, in both orders of neighbours.
const std::vector<uint8_t> kDecayed = {1, 0, 0, 1, 1};

template <class T>
struct DevicePartials {
  explicit DevicePartials(const Partials<T>& partials) {
    for (const std::vector<T>& values : partials.values) {
      arrays.emplace_back(values);
      pointers.push_back(arrays.back().get());
    }
  }
  std::vector<DeviceArray<T>> arrays;
  std::vector<const T*> pointers;
};

// The state of a SplitBuffers or MasterBuffers on the device.
struct DeviceSplit {
  explicit DeviceSplit(const SplitBuffers& from) : weight(from.weight), rest(from.rest) {}
  SplitState state() const {
    return {.weight = weight.get(), .rest = reinterpret_cast<std::byte*>(rest.get())};
  }
  SplitBuffers ToHost() const {
    SplitBuffers buffers(0);
    buffers.weight = weight.ToHost();
    buffers.rest = rest.ToHost();
    return buffers;
  }
  DeviceArray<uint16_t> weight;
  DeviceArray<float> rest;
};
struct DeviceMaster {
  explicit DeviceMaster(const MasterBuffers& from) : master(from.master), rest(from.rest) {}
  MasterState state() const {
    return {.master = master.get(), .rest = reinterpret_cast<std::byte*>(rest.get())};
  }
  MasterBuffers ToHost() const {
    MasterBuffers buffers(0);
    buffers.master = master.ToHost();
    buffers.rest = rest.ToHost();
    return buffers;
  }
  DeviceArray<float> master;
  DeviceArray<float> rest;
};
DeviceSplit OnDevice(const SplitBuffers& buffers) { return DeviceSplit(buffers); }
DeviceMaster OnDevice(const MasterBuffers& buffers) { return DeviceMaster(buffers); }

AdamWScalars WithoutDecay(AdamWScalars scalars) {
  scalars.decay = 1.0f;
  return scalars;
}

template <class Buffers, class T>
void UpdateOnCpu(const AdamWScalars& scalars, const Partials<T>& gradient, Buffers* buffers) {
  for (int64_t block = 0; block < kBlocks; ++block) {
    Update(SimdLevel::kScalar, kDecayed[block] ? scalars : WithoutDecay(scalars), gradient, buffers,
           block * kTestBlockElements, kTestBlockElements);
  }
}

Bfloat16Partials View(const DevicePartials<uint16_t>& partials) { return {partials.pointers}; }
Float32Partials View(const DevicePartials<float>& partials) { return {partials.pointers}; }

template <class Buffers, class T>
void ExpectBitEqual(uint64_t seed) {
  Patterns patterns(seed);
  const DeviceArray<uint8_t> decayed(kDecayed);
  int setting = 0;
  for (const AdamWScalars& scalars : ScalarsToTry()) {
    for (const int ranks : {1, 2, 3, 8}) {
      SCOPED_TRACE(::testing::Message()
                   << "seed " << seed << ", setting " << setting << ", ranks " << ranks);
      Buffers expected(kBlocks);
      FillWithPatterns(&patterns, &expected, kElements);
      const auto device = OnDevice(expected);
      for (int step = 0; step < 2; ++step) {  // The second starts from what the first stored.
        const Partials<T> gradient(&patterns, ranks, kElements);
        UpdateOnCpu(scalars, gradient, &expected);
        const DevicePartials<T> on_device(gradient);
        AdamWUpdate({.scalars = scalars, .decayed_blocks = decayed.get()}, View(on_device),
                    device.state(), kElements, nullptr);
        Buffers actual = device.ToHost();
        ASSERT_TRUE(SameBits(expected, actual)) << "step " << step;
      }
    }
    ++setting;
  }
}

TEST(AdamWKernelTest, UpdateIsBitEqualToScalarOnAdversarialPatterns) {
  const ScopedOptimizerMxcsr mxcsr;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    ExpectBitEqual<SplitBuffers, uint16_t>(seed);
    ExpectBitEqual<SplitBuffers, float>(seed);
    ExpectBitEqual<MasterBuffers, float>(seed);
  }
}

// Every bit of weight, low half, moments and gradient at random: no pattern was thought of.
TEST(AdamWKernelTest, UpdateIsBitEqualToScalarOnRandomBits) {
  const ScopedOptimizerMxcsr mxcsr;
  constexpr int64_t kManyBlocks = 96, kMany = kManyBlocks * kTestBlockElements;
  Patterns patterns(50);
  for (const AdamWScalars& scalars : ScalarsToTry()) {
    SplitBuffers expected(kManyBlocks);
    for (uint16_t& bits : expected.weight) bits = static_cast<uint16_t>(patterns.Bits());
    for (float& value : expected.rest) {
      const uint32_t bits = patterns.Bits();
      std::memcpy(&value, &bits, 4);
    }
    Partials<float> gradient(&patterns, 2, kMany);
    for (auto& of_rank : gradient.values) {
      for (float& value : of_rank) {
        const uint32_t bits = patterns.Bits();
        std::memcpy(&value, &bits, 4);
      }
    }
    const DeviceSplit device(expected);
    Update(SimdLevel::kScalar, scalars, gradient, &expected, 0, kMany);
    AdamWUpdate({.scalars = scalars}, View(DevicePartials<float>(gradient)), device.state(), kMany,
                nullptr);
    SplitBuffers actual = device.ToHost();
    ASSERT_TRUE(SameBits(expected, actual));
  }
}

TEST(AdamWKernelTest, AccumulatorsAreRoundedToBfloat16BeforeTheyAreAdded) {
  const ScopedOptimizerMxcsr mxcsr;
  Patterns patterns(60);
  const AdamWScalars scalars = ScalarsToTry()[1];
  for (const int ranks : {1, 3}) {
    const Partials<float> accumulators(&patterns, ranks, kElements);
    Partials<uint16_t> rounded(&patterns, ranks, kElements);
    for (int rank = 0; rank < ranks; ++rank) {
      RoundToBfloat16(accumulators.values[rank], rounded.values[rank].data());
    }
    SplitBuffers expected(kBlocks);
    FillWithPatterns(&patterns, &expected, kElements);
    const DeviceSplit device(expected);
    Update(SimdLevel::kScalar, scalars, rounded, &expected, 0, kElements);
    const DevicePartials<float> on_device(accumulators);
    AdamWUpdate({.scalars = scalars}, RoundedPartials{on_device.pointers}, device.state(),
                kElements, nullptr);
    SplitBuffers actual = device.ToHost();
    ASSERT_TRUE(SameBits(expected, actual)) << ranks;
  }
}

TEST(AdamWKernelTest, ClipFactorOnTheDeviceReplacesTheScalar) {
  const ScopedOptimizerMxcsr mxcsr;
  Patterns patterns(70);
  for (const float clip : {1.0f, 0.37f, 1e-20f, 0.0f, std::numeric_limits<float>::quiet_NaN()}) {
    AdamWScalars scalars = ScalarsToTry()[0];
    const DeviceAdamWOptions options{.scalars = scalars};
    scalars.clip = clip;
    SplitBuffers expected(kBlocks);
    FillWithPatterns(&patterns, &expected, kElements);
    const DeviceSplit device(expected);
    const Partials<uint16_t> gradient(&patterns, 2, kElements);
    Update(SimdLevel::kScalar, scalars, gradient, &expected, 0, kElements);
    const DeviceArray<float> on_device(std::vector<float>{clip});
    DeviceAdamWOptions with_clip = options;
    with_clip.clip = on_device.get();
    const DevicePartials<uint16_t> partials(gradient);
    AdamWUpdate(with_clip, View(partials), device.state(), kElements, nullptr);
    SplitBuffers actual = device.ToHost();
    ASSERT_TRUE(SameBits(expected, actual)) << clip;
  }
}

TEST(AdamWKernelTest, NoBlocksAreNoWork) {
  AdamWUpdate({.scalars = ScalarsToTry()[0]}, Bfloat16Partials{std::vector<const uint16_t*>(1)},
              SplitState{.weight = nullptr, .rest = nullptr}, 0, nullptr);
}

}  // namespace
}  // namespace oom::testing
