// What the tests of the elementwise kernels share: random CUDA tensors, raw pointers into them, and
// the two measures of error. A kernel in FP32 is held against the composite operator in FP64; in
// BF16 its error may be no larger than 1.2 times the composite's own.

#pragma once

#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "runtime/ops/aten.h"

namespace oom::testing {

inline constexpr double kFloatBar = 1e-6;

template <class T>
constexpr at::ScalarType ScalarTypeOf() {
  if constexpr (sizeof(T) == 2) {
    return at::kBFloat16;
  } else {
    return at::kFloat;
  }
}

// Of the tensor's first element; strides are the caller's affair.
template <class T>
T* Data(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

// Normal, from a CPU generator, so that a seed means the same values everywhere.
at::Tensor Random(at::IntArrayRef shape, uint64_t seed, at::ScalarType type = at::kDouble);

// NaN everywhere: what a kernel does not write shows.
at::Tensor Unwritten(at::IntArrayRef shape, at::ScalarType type);

double RelativeError(const at::Tensor& actual, const at::Tensor& expected);

bool BitEqual(const at::Tensor& a, const at::Tensor& b);

// `exact` is the composite in FP64 on the same inputs, `composite` in the activations' type. Wide
// sums of narrow values pass at the bar of FP32 too.
void ExpectAsExactAs(const at::Tensor& composite, const at::Tensor& actual, const at::Tensor& exact,
                     const std::string& what);

template <class T>
class ElementwiseTest : public ::testing::Test {};
using ActivationTypes = ::testing::Types<__nv_bfloat16, float>;

}  // namespace oom::testing
