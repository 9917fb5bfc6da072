// Gated activation: y = act(gate) * up. SwiGLU: act = silu; GeGLU: act = gelu in its tanh form,
//   gelu(g) = g/2 * (1 + tanh u),  u = sqrt(2/pi) * (g + 0.044715 g^3).
// Backward: dup = dy * act(gate);  dgate = dy * up * act'(gate),
//   silu'(g) = s * (1 + g * (1 - s)), s = logistic(g);
//   gelu'(g) = (1 + tanh u)/2 + g/2 * (1 - tanh(u)^2) * sqrt(2/pi) * (1 + 0.134145 g^2).
// Shapes: R rows, I width; gate_up [R, 2I] (columns 0..I-1 gate, I..2I-1 up), y [R, I].
// Forward keeps nothing: backward recomputes act from gate_up. act is rounded before the product.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

at::Tensor SwigluForward(const at::Tensor& gate_up_RF, Activation activation);

// The gradient of gate_up, in dy's type.
at::Tensor SwigluBackward(const at::Tensor& dy_RI, const at::Tensor& gate_up_RF,
                          Activation activation);

}  // namespace oom
