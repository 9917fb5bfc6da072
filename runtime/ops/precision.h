// Which precision an operator computes in, and the two products that every backward is made of.
// "Wide" is FP32, or FP64 where the tensors are FP64: norms, softmax, rotary angles, sums over
// parts and parameter gradients are wide whatever the activations are. Thread-safe: pure functions
// of tensors.

#pragma once

#include "runtime/ops/aten.h"

namespace oom {

// FP64 for FP64, FP32 for everything else.
at::ScalarType WideType(at::ScalarType type);

// `tensor` itself if it is wide already, else a converted copy.
at::Tensor Wide(const at::Tensor& tensor);

// gradient_OI += dy_RO.T @ x_RI, computed in the gradient's type: the product is never rounded to a
// narrower type before it is added. Rows of `gradient` may be strided.
void AccumulateWeightGradient(at::Tensor gradient_OI, const at::Tensor& dy_RO,
                              const at::Tensor& x_RI);

// sum_RI += a_RO @ b_OI. The product is formed in a's type, the sum is kept in its own.
void AddProduct(at::Tensor sum_RI, const at::Tensor& a_RO, const at::Tensor& b_OI);

// Bytes of a tensor; 0 if it is undefined.
int64_t TensorBytes(const at::Tensor& tensor);

}  // namespace oom
