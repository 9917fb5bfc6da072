// Goal: roundings, sums over ranks, squares and their sum have the bits of runtime/optim.
// Method: the CPU's functions on the same random and adversarial patterns.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "runtime/kernels/gradient.h"
#include "tests/gpu/elementwise/device_array.h"
#include "tests/optim/adamw_testing.h"

namespace oom::testing {
namespace {

TEST(RoundToBfloat16KernelTest, BitsAreThoseOfTheCpu) {
  Patterns patterns(1);
  for (const int64_t elements : {0, 1, 3, 4096, 4097, 1000003, 1 << 20}) {
    for (const int64_t offset : {0, 1}) {
      std::vector<float> values(elements + offset);
      for (size_t i = 0; i < values.size(); ++i) {
        const uint32_t bits = patterns.Bits();
        std::memcpy(&values[i], &bits, 4);
        if (i % 2 == 0) values[i] = patterns.Float();
      }
      std::vector<uint16_t> expected(elements);
      RoundToBfloat16(std::span<const float>(values).subspan(offset), expected.data());
      const DeviceArray<float> on_device(values);
      const DeviceArray<uint16_t> out(elements);
      RoundToBfloat16(on_device.get() + offset, elements, out.get(), nullptr);
      EXPECT_TRUE(SameBytes(out.ToHost(), expected)) << elements << " from " << offset;
    }
  }
}

TEST(AccumulateFloat32KernelTest, SumsAreThoseOfTheCpu) {
  Patterns patterns(2);
  for (const int64_t elements : {0, 1, 4096, 4097, 1000003}) {
    std::vector<float> values(elements), accumulator(elements);
    for (int64_t i = 0; i < elements; ++i) {
      values[i] = patterns.Float();
      accumulator[i] = patterns.Ordinary();
      if (std::isnan(values[i])) values[i] = 1e-42f;  // The payload of a NaN is the machine's.
    }
    const DeviceArray<float> on_device(values), sum(accumulator);
    AccumulateFloat32(on_device.get(), elements, sum.get(), nullptr);
    AccumulateFloat32(values, accumulator.data());
    EXPECT_TRUE(SameBytes(sum.ToHost(), accumulator)) << elements;
  }
}

TEST(AccumulateFloat32KernelTest, AnAccumulatorInHostMemoryGetsTheSameSums) {
  Patterns patterns(9);
  // More than the few blocks take at once, and an end that fills no vector.
  for (const int64_t elements : {int64_t{1}, int64_t{4096}, (int64_t{1} << 20) + 7}) {
    std::vector<float> values(elements), expected(elements);
    for (int64_t i = 0; i < elements; ++i) {
      values[i] = patterns.Ordinary();
      expected[i] = patterns.Ordinary();
    }
    float* accumulator = nullptr;
    CheckCuda(cudaHostAlloc(reinterpret_cast<void**>(&accumulator), elements * sizeof(float),
                            cudaHostAllocMapped));
    std::copy(expected.begin(), expected.end(), accumulator);
    const DeviceArray<float> on_device(values);
    AccumulateFloat32OnHost(on_device.get(), elements, accumulator, nullptr);
    CheckCuda(cudaDeviceSynchronize());
    AccumulateFloat32(values, expected.data());
    EXPECT_TRUE(SameBytes(std::vector<float>(accumulator, accumulator + elements), expected)) << elements;
    CheckCuda(cudaFreeHost(accumulator));
  }
}

template <class T>
std::vector<DeviceArray<T>> OnDevice(const Partials<T>& partials) {
  std::vector<DeviceArray<T>> arrays;
  for (const std::vector<T>& values : partials.values) arrays.emplace_back(values);
  return arrays;
}
template <class T>
std::vector<const T*> Pointers(const std::vector<DeviceArray<T>>& arrays) {
  std::vector<const T*> pointers;
  for (const DeviceArray<T>& array : arrays) pointers.push_back(array.get());
  return pointers;
}

template <class View, class T>
bool SquaresOnDevice(const Partials<T>& gradient, int64_t blocks, std::vector<double>* squares) {
  const auto arrays = OnDevice(gradient);
  const auto pointers = Pointers(arrays);
  const DeviceArray<double> out(std::vector<double>(blocks, -1.0));
  const DeviceArray<int32_t> finite(std::vector<int32_t>{1});
  GradientSquares(View{pointers}, blocks * kTestBlockElements, out.get(), finite.get(), nullptr);
  *squares = out.ToHost();
  return finite.ToHost()[0] == 1;
}

template <class T, class View>
void ExpectSquaresOfTheCpu(int64_t blocks, int ranks, bool ordinary, uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << blocks << " blocks, " << ranks << " ranks, seed " << seed);
  Patterns patterns(seed);
  Partials<T> gradient(&patterns, ranks, blocks * kTestBlockElements);
  for (auto& of_rank : gradient.values) {
    for (T& value : of_rank) {
      if (!ordinary) continue;
      const float x = 1e-3f * patterns.Ordinary();
      if constexpr (sizeof(T) == 2) {
        RoundToBfloat16({&x, 1}, &value);
      } else {
        value = x;
      }
    }
  }
  std::vector<double> expected(blocks), actual;
  const auto ranks_of = gradient.At(0);
  const bool finite =
      GradientSquares(SimdLevel::kScalar, View{ranks_of}, blocks * kTestBlockElements, expected);
  EXPECT_EQ(SquaresOnDevice<View>(gradient, blocks, &actual), finite);
  EXPECT_TRUE(SameBytes(expected, actual));
}

TEST(GradientSquaresKernelTest, SquaresAreThoseOfTheCpu) {
  const ScopedOptimizerMxcsr mxcsr;
  for (const int64_t blocks : {1, 2, 16, 37}) {
    for (const int ranks : {1, 2, 3, 8}) {
      for (const bool ordinary : {false, true}) {
        ExpectSquaresOfTheCpu<uint16_t, Bfloat16Partials>(blocks, ranks, ordinary, blocks + ranks);
        ExpectSquaresOfTheCpu<float, Float32Partials>(blocks, ranks, ordinary, blocks + ranks);
      }
    }
  }
}

TEST(GradientSquaresKernelTest, AccumulatorsAreRoundedFirst) {
  const ScopedOptimizerMxcsr mxcsr;
  Patterns patterns(5);
  constexpr int64_t kBlocks = 3, kElements = kBlocks * kTestBlockElements;
  const Partials<float> accumulators(&patterns, 2, kElements);
  Partials<uint16_t> rounded(&patterns, 2, kElements);
  for (int rank = 0; rank < 2; ++rank) {
    RoundToBfloat16(accumulators.values[rank], rounded.values[rank].data());
  }
  std::vector<double> expected(kBlocks), actual;
  const auto ranks = rounded.At(0);
  GradientSquares(SimdLevel::kScalar, Bfloat16Partials{ranks}, kElements, expected);
  SquaresOnDevice<RoundedPartials>(accumulators, kBlocks, &actual);
  EXPECT_TRUE(SameBytes(expected, actual));
}

// Goal: one bad value anywhere is found, and only its block's sum is bad.
TEST(GradientSquaresKernelTest, AnyNonFiniteValueIsReported) {
  Patterns patterns(6);
  constexpr int64_t kBlocks = 18;
  for (const uint32_t bits : {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFFFFFFFu, 0x7F800001u}) {
    Partials<float> gradient(&patterns, 1, kBlocks * kTestBlockElements);
    for (float& value : gradient.values[0]) value = patterns.Ordinary();
    std::vector<double> squares;
    ASSERT_TRUE(SquaresOnDevice<Float32Partials>(gradient, kBlocks, &squares));
    const int64_t place = patterns.Bits() % (kBlocks * kTestBlockElements);
    std::memcpy(&gradient.values[0][place], &bits, 4);
    EXPECT_FALSE(SquaresOnDevice<Float32Partials>(gradient, kBlocks, &squares)) << place;
    for (int64_t block = 0; block < kBlocks; ++block) {
      EXPECT_EQ(std::isfinite(squares[block]), block != place / kTestBlockElements);
    }
  }
}

TEST(AddSquaresInOrderKernelTest, SumIsSequentialAndContinuesWhatIsThere) {
  Patterns patterns(7);
  for (const int64_t blocks : {0, 1, 15, 2047, 2048, 2049, 10001}) {
    std::vector<double> squares(blocks);
    for (double& value : squares) value = std::exp(8.0 * patterns.Ordinary());
    double expected = 3.0;
    for (const double value : squares) expected += value;
    const DeviceArray<double> on_device(squares), sum(std::vector<double>{3.0});
    AddSquaresInOrder(on_device.get(), blocks, sum.get(), nullptr);
    EXPECT_EQ(sum.ToHost()[0], expected) << blocks;
  }
}

}  // namespace
}  // namespace oom::testing
