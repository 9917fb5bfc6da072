// The two gates of the delta rule, as runtime/ops/delta_gates:
//   beta = logistic(b);  g = -e^A_log softplus(a + dt_bias).
// Backward:  db = dbeta beta (1 - beta);  da = -dg e^A_log softplus'(a + dt_bias);
//   ddt_bias += sum over tokens of da;  dA_log += sum over tokens of dg g.
// Shapes: T tokens, N value heads; b, a, db, da [T, N] BF16, the rest FP32: beta, g [T, N], A_log,
// dt_bias [N]. Arithmetic is FP32; db and da are rounded once. Keeps nothing. The order of sums
// follows from T. Arguments must not alias.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct DeltaGateKernelInput {
  int64_t tokens = 0;
  int value_heads = 0;
  const __nv_bfloat16* b_TN = nullptr;
  const __nv_bfloat16* a_TN = nullptr;
  const float* a_log_N = nullptr;
  const float* dt_bias_N = nullptr;
};

void DeltaGatesForward(const DeltaGateKernelInput& input, float* beta_TN, float* log_decay_TN,
                       cudaStream_t stream);

struct DeltaGateKernelGradients {
  const float* beta_TN = nullptr;  // Of the outputs.
  const float* log_decay_TN = nullptr;
  __nv_bfloat16* b_TN = nullptr;
  __nv_bfloat16* a_TN = nullptr;
  float* a_log_N = nullptr;  // Accumulates, as does the next.
  float* dt_bias_N = nullptr;
};

int64_t DeltaGatesBackwardScratchBytes(const DeltaGateKernelInput& input);

void DeltaGatesBackward(const DeltaGateKernelInput& input,
                        const DeltaGateKernelGradients& gradients, void* scratch,
                        cudaStream_t stream);

}  // namespace oom
