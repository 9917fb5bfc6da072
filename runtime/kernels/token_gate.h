// The gate of an expert that serves all tokens, one number a token, as runtime/ops/shared_expert:
//   y = residual + s f,  s = logistic(z).
// Backward: df = s dy;  dz = s (1 - s) <dy, f>.
// Arithmetic is FP32; y, df and dz are rounded once. Shapes: T tokens, H wide, contiguous; z and dz
// [T]. BF16. A token's sum has one order. Keeps nothing.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct TokenGateShape {
  int64_t tokens = 0;
  int64_t width = 0;
};

struct TokenGateForwardArguments {
  const __nv_bfloat16* f_TH = nullptr;
  const __nv_bfloat16* logit_T = nullptr;
  const __nv_bfloat16* residual_TH = nullptr;
  __nv_bfloat16* y_TH = nullptr;  // May be f or the residual.
};

void TokenGateForward(const TokenGateShape& shape, const TokenGateForwardArguments& arguments,
                      cudaStream_t stream);

struct TokenGateBackwardArguments {
  const __nv_bfloat16* dy_TH = nullptr;
  const __nv_bfloat16* f_TH = nullptr;
  const __nv_bfloat16* logit_T = nullptr;
  __nv_bfloat16* df_TH = nullptr;  // May be f.
  __nv_bfloat16* dlogit_T = nullptr;
};

void TokenGateBackward(const TokenGateShape& shape, const TokenGateBackwardArguments& arguments,
                       cudaStream_t stream);

}  // namespace oom
