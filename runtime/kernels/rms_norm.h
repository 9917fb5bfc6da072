// RMSNorm: y = xh * s, xh = x * r, r = (mean(x^2) + epsilon)^(-1/2), s = w, 1 + w, or 1 without a
// weight, as runtime/ops/rms_norm.
// With a residual: h = x + residual, rounded to T; y = norm(h); both are written.
// With an addend, a factor or both: y = (norm(x) + addend) * factor, rounded to T after each step.
// Backward, with a = dy * s:  dx = r * (a - xh * mean(xh * a)), plus the residual's gradient if
// there is one, then rounded once to dx's type;  dw += sum over rows of dy * xh. Shapes: R rows, H
// width; rows are contiguous; H is the hidden size or a head's. T is BF16 or FP32; dy, dx and the
// residual's gradient are T or FP32 (wide). Sums are FP32; in forward xh is rounded to T before it
// meets w, or only the product is (NormScale); in backward nothing is. r is recomputed: nothing is
// kept. The order of all sums follows from the shape and the pointers' alignment alone. REQUIRES: H
// at most 32,768 (BF16) or 16,384 (FP32) forward, half of the former backward.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/model/description.h"

namespace oom {

struct RmsNormShape {
  int64_t rows = 0;
  int64_t width = 0;
};

template <class T>
struct RmsNormForwardArguments {
  const T* x_RH = nullptr;
  const T* residual_RH = nullptr;  // Null: none.
  const T* weight_H = nullptr;     // Null: none.
  NormScale scale = NormScale::kWeightAfterRounding;
  float epsilon = 0.0f;
  const T* addend_RH = nullptr;   // Null: none. Not with a residual.
  const float* factor = nullptr;  // One value on the device. Null: none. Not with a residual.
  T* sum_RH = nullptr;            // With a residual only; may be x or residual.
  T* y_RH = nullptr;              // May be x, residual or addend, but not sum.
};

void RmsNormForward(const RmsNormShape& shape,
                    const RmsNormForwardArguments<__nv_bfloat16>& arguments, cudaStream_t stream);
void RmsNormForward(const RmsNormShape& shape, const RmsNormForwardArguments<float>& arguments,
                    cudaStream_t stream);

template <class T, class Dy, class Dx, class Residual = T>
struct RmsNormBackwardArguments {
  const Dy* dy_RH = nullptr;
  const T* x_RH = nullptr;
  const T* weight_H = nullptr;  // Null: none.
  NormScale scale = NormScale::kWeightAfterRounding;
  float epsilon = 0.0f;
  const Residual* residual_gradient_RH = nullptr;  // Null: none.
  Dx* dx_RH = nullptr;         // May be dy, x or the residual's gradient where the types agree.
  float* dweight_H = nullptr;  // Accumulates; null: not wanted, or no weight.
  float* scratch = nullptr;    // RmsNormBackwardScratchBytes; null if dweight is.
};

int64_t RmsNormBackwardScratchBytes(const RmsNormShape& shape);

using Bfloat16RmsNormBackward =
    RmsNormBackwardArguments<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>;
void RmsNormBackward(const RmsNormShape& shape, const Bfloat16RmsNormBackward& arguments,
                     cudaStream_t stream);
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, float, __nv_bfloat16>& arguments,
                     cudaStream_t stream);
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, __nv_bfloat16, float>& arguments,
                     cudaStream_t stream);
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, float, float>& arguments,
                     cudaStream_t stream);
void RmsNormBackward(
    const RmsNormShape& shape,
    const RmsNormBackwardArguments<__nv_bfloat16, float, __nv_bfloat16, float>& arguments,
    cudaStream_t stream);
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, float, float, float>& arguments,
                     cudaStream_t stream);
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<float, float, float>& arguments,
                     cudaStream_t stream);

}  // namespace oom
