// RMSNorm of value heads with a plain weight, then a SiLU gate, as runtime/ops/gated_rms_norm:
//   y = xh w silu(z), xh = x r, r = (mean(x^2) + epsilon)^(-1/2).
// Backward, with e = dy w silu(z):  dx = r (e - xh mean(xh e));  dz = dy w xh silu'(z);
//   dw += sum over rows of dy xh silu(z).
// Shapes: R rows of 128 (tokens times value heads); x, z, y, dy and dz BF16, w, dw and dx FP32.
// Arithmetic is FP32, each result rounded once. Keeps nothing: r is recomputed. The order of sums
// follows from R. Rows are contiguous, aligned to 16 bytes; arguments must not alias.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct GatedRmsNormInput {
  int64_t rows = 0;
  float epsilon = 0.0f;
  const __nv_bfloat16* x_RV = nullptr;
  const __nv_bfloat16* gate_RV = nullptr;
  const float* weight_V = nullptr;
};

void GatedRmsNormForward(const GatedRmsNormInput& input, __nv_bfloat16* y_RV, cudaStream_t stream);

struct GatedRmsNormKernelGradients {
  float* x_RV = nullptr;
  __nv_bfloat16* gate_RV = nullptr;
  float* weight_V = nullptr;  // Accumulates; null: not wanted.
};

int64_t GatedRmsNormBackwardScratchBytes();

void GatedRmsNormBackward(const GatedRmsNormInput& input, const __nv_bfloat16* dy_RV,
                          const GatedRmsNormKernelGradients& gradients, void* scratch,
                          cudaStream_t stream);

}  // namespace oom
