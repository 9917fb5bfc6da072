// Depthwise causal convolution of each document, then SiLU:
//   c_t = sum_{j < J} w_j * x_{t-J+1+j};  y_t = silu(c_t);
// the last tap meets the token itself; before a document's first token stands its context.
// Backward, with dc = dy * silu'(c):
//   dx_t = sum_j w_j * dc_{t+J-1-j}, the gradient of the outgoing context added where x_t is in it;
//   dw_j += sum_t dc_t * x_{t-J+1+j};  dcontext likewise, for the rows that came before.
// Shapes: T tokens, C channels, J taps, D documents; x, y [T, C], w [C, J], context [D, J - 1, C]
// (the J - 1 rows before a document's first token, or its last ones), in x's type.
// Sums and silu are wide and rounded once. Forward keeps nothing: backward recomputes c.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/ops/aten.h"

namespace oom {

struct CausalConvolutionOutput {
  at::Tensor y_TC;         // In x's type.
  at::Tensor context_DPC;  // P = J - 1.
};

struct CausalConvolutionGradients {
  at::Tensor x_TC;         // In x's type.
  at::Tensor context_DPC;  // Wide; undefined where the context was.
};

// `context_DPC`: undefined is zeros. REQUIRES: at least one token.
CausalConvolutionOutput CausalConvolutionForward(const at::Tensor& x_TC,
                                                 const at::Tensor& weight_CJ,
                                                 const at::Tensor& context_DPC,
                                                 const std::vector<int64_t>& cu_seqlens);

struct CausalConvolutionBackwardInput {
  at::Tensor dy_TC;
  at::Tensor dcontext_DPC;  // Of the outgoing context; undefined is zeros.
  at::Tensor x_TC;
  at::Tensor context_DPC;  // As forward had it.
};

// `dweight_CJ` (wide) accumulates.
CausalConvolutionGradients CausalConvolutionBackward(const CausalConvolutionBackwardInput& input,
                                                     const at::Tensor& weight_CJ,
                                                     const std::vector<int64_t>& cu_seqlens,
                                                     at::Tensor dweight_CJ);

}  // namespace oom
