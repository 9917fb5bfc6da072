// The delta rule's inputs from a projection's output: depthwise causal convolution of four taps,
// SiLU, and q and k brought to length 1, in one pass; formulas as in runtime/ops/causal_convolution
// and l2_norm:
//   c_t = sum_j w_j x_{t-3+j};  u = silu(c);  q, k = u r, r = (sum(u^2) + 1e-6)^(-1/2);  v = u.
// Backward: du = r (dq - q sum(dq q)) or dv;  dc = du silu'(c);  dx_t = sum_j w_j dc_{t+3-j};
//   dw_j += sum_t dc_t x_{t-3+j}; likewise the contexts, the three rows before a document's first
//   token and its last three.
// Shapes: T tokens, D documents, C = 2 key_width + value_width channels (q, then k, then v), all
// widths multiples of the head size 128; x [T, C], w [C, 4], contexts [D, 3, C]. Arithmetic is FP32
// and nothing between x and the results is rounded; q and k are FP16, which the rule's products
// take. Forward keeps nothing. The order of sums follows from the shape. Arguments must not alias;
// rows are aligned to 16 bytes.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct CausalConvolutionShape {
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t key_width = 0;
  int64_t value_width = 0;

  constexpr int64_t channels() const { return 2 * key_width + value_width; }
};

struct CausalConvolutionKernelInput {
  const __nv_bfloat16* x_TC = nullptr;
  const __nv_bfloat16* weight_CJ = nullptr;
  const __nv_bfloat16* context_DPC = nullptr;  // Null: zeros.
  const int64_t* cu_seqlens = nullptr;         // On the device, [D + 1].
};

struct CausalConvolutionKernelOutput {
  __half* query = nullptr;  // [T, key_width]
  __half* key = nullptr;
  __nv_bfloat16* value = nullptr;        // [T, value_width]
  __nv_bfloat16* context_DPC = nullptr;  // Null: not wanted.
};

void CausalConvolutionForward(const CausalConvolutionShape& shape,
                              const CausalConvolutionKernelInput& input,
                              const CausalConvolutionKernelOutput& output, cudaStream_t stream);

struct CausalConvolutionOutputGradient {
  const float* query = nullptr;
  const float* key = nullptr;
  const float* value = nullptr;
  const float* context_DPC = nullptr;  // Null: zeros.
};

struct CausalConvolutionKernelGradients {
  __nv_bfloat16* x_TC = nullptr;
  float* context_DPC = nullptr;  // Null: not wanted.
  float* weight_CJ = nullptr;    // Accumulates.
};

int64_t CausalConvolutionBackwardScratchBytes(const CausalConvolutionShape& shape);

void CausalConvolutionBackward(const CausalConvolutionShape& shape,
                               const CausalConvolutionKernelInput& input,
                               const CausalConvolutionOutputGradient& doutput,
                               const CausalConvolutionKernelGradients& gradients, void* scratch,
                               cudaStream_t stream);

}  // namespace oom
