// What the CUDA operators share: tensors as the kernels' raw pointers, scratch memory from
// LibTorch's caching allocator, and the products and norms that every one of them is made of.
// Everything runs on LibTorch's current stream.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "runtime/base/check.h"
#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

cudaStream_t OperatorStream();

// The elements of a contiguous tensor on the GPU; null if it is undefined.
template <class T>
T* DeviceData(const at::Tensor& tensor) {
  constexpr at::ScalarType kType = std::is_same_v<T, float>           ? at::kFloat
                                   : std::is_same_v<T, double>        ? at::kDouble
                                   : std::is_same_v<T, __nv_bfloat16> ? at::kBFloat16
                                   : std::is_same_v<T, __half>        ? at::kHalf
                                   : std::is_same_v<T, int64_t>       ? at::kLong
                                                                      : at::kInt;
  static_assert(kType != at::kInt || std::is_same_v<T, int32_t>);
  if (!tensor.defined()) return nullptr;
  OOM_CHECK(tensor.scalar_type() == kType && tensor.is_cuda() && tensor.is_contiguous());
  return static_cast<T*>(tensor.data_ptr());
}

// Not initialised, where `like` is.
at::Tensor ScratchBytes(int64_t bytes, const at::Tensor& like);

// gradient_OI += dy_RO.T @ x_RI, BF16 products added up in FP32. Rows of `gradient` may be strided.
void AddWeightGradient(at::Tensor gradient_OI, const at::Tensor& dy_RO, const at::Tensor& x_RI);

// sum_RI += a_RO @ b_OI, likewise.
void AddWideProduct(at::Tensor sum_RI, const at::Tensor& a_RO, const at::Tensor& b_OI);

// What a normed row meets, rounded after each; what is undefined changes nothing.
struct AfterNorm {
  at::Tensor addend_RH;
  at::Tensor factor;  // FP32, one value.
};

// As runtime/ops/rms_norm, of rows: (norm(x) + addend) * factor.
at::Tensor NormForward(const at::Tensor& x_RH, const at::Tensor& weight_H, const NormRule& rule,
                       const AfterNorm& after = {});

struct NormGradient {
  at::Tensor dy_RH;  // BF16 or wide.
  at::Tensor x_RH;
  at::Tensor weight_H;  // May be undefined.
  NormRule rule;
  // Added before the result is rounded; BF16, or wide with a wide dy; may be undefined.
  at::Tensor residual_gradient_RH;
  at::Tensor dweight_H;  // Accumulates; may be undefined.
};

// Into `dx_RH`, BF16 or wide; it may be dy, x or the residual's gradient.
void NormBackward(const NormGradient& gradient, at::Tensor dx_RH);

}  // namespace oom
