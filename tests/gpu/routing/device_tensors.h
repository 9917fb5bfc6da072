// What the tests of the routing kernels share: tensors on the GPU as the kernels' raw pointers, and
// comparisons. Results are poisoned before a kernel writes them.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "runtime/ops/aten.h"

namespace oom::testing {

template <class T>
inline constexpr at::ScalarType kScalarType = std::is_same_v<T, float>           ? at::kFloat
                                              : std::is_same_v<T, __nv_bfloat16> ? at::kBFloat16
                                              : std::is_same_v<T, double>        ? at::kDouble
                                              : std::is_same_v<T, int64_t>       ? at::kLong
                                                                                 : at::kInt;

// The elements of a tensor, whose type must be T.
template <class T>
T* Pointer(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == kScalarType<T> && tensor.is_contiguous());
  return static_cast<T*>(tensor.data_ptr());
}

at::TensorOptions OnDevice(at::ScalarType type);

// Normal numbers on the GPU from a seed.
at::Tensor Random(at::IntArrayRef shape, uint64_t seed, at::ScalarType type);

// Filled with NaN, or with all bits set if the type has none. `offset_elements`: where the tensor
// begins in its storage, to have rows that are not aligned.
at::Tensor Poisoned(at::IntArrayRef shape, at::ScalarType type, int64_t offset_elements = 0);

// A copy that begins `offset_elements` into its storage.
at::Tensor AtOffset(const at::Tensor& tensor, int64_t offset_elements);

// T tokens' distinct experts, [T, K] int32 on the GPU; the lower experts are chosen more often.
at::Tensor RandomChoices(int64_t tokens, int64_t choices, int64_t experts, uint64_t seed);

// ||a - b|| / ||b||; infinite if anything is NaN.
double RelativeError(const at::Tensor& actual, const at::Tensor& expected);

// Same type, shape and bits, on whichever device.
bool BitEqual(const at::Tensor& a, const at::Tensor& b);

}  // namespace oom::testing
