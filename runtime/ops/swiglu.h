// SwiGLU: y = silu(gate) * up.
// Backward: dup = dy * silu(gate);  dgate = dy * up * s * (1 + gate * (1 - s)), s = logistic(gate).
// Shapes: R rows, I width; gate_up [R, 2I] (columns 0..I-1 gate, I..2I-1 up), y [R, I].
// Forward keeps nothing: backward recomputes silu from gate_up. silu is rounded before the product.

#pragma once

#include "runtime/ops/aten.h"

namespace oom {

at::Tensor SwigluForward(const at::Tensor& gate_up_RF);

// The gradient of gate_up, in dy's type.
at::Tensor SwigluBackward(const at::Tensor& dy_RI, const at::Tensor& gate_up_RF);

}  // namespace oom
