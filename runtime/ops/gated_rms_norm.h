// RMSNorm with a plain weight, then a SiLU gate (norm before gate):
//   y = xh * w * silu(z), xh = x * r, r = (mean(x^2) + epsilon)^(-1/2).
// Backward, with e = dy * w * silu(z):
//   dx = r * (e - xh * mean(xh * e));  dz = dy * w * xh * silu'(z);
//   dw += sum over rows of dy * xh * silu(z).
// Shapes: x, z, y [..., V], w [V]; V is a value head's size. xh is rounded to x's type before it
// meets w, as the published models do; the gate is wide. Keeps nothing: r is recomputed.

#pragma once

#include "runtime/ops/aten.h"

namespace oom {

// y in x's type.
at::Tensor GatedRmsNormForward(const at::Tensor& x, const at::Tensor& gate,
                               const at::Tensor& weight_V, double epsilon);

struct GatedRmsNormGradients {
  at::Tensor x;     // Wide.
  at::Tensor gate;  // In the gate's type.
};

// `dweight_V` accumulates; undefined: not wanted.
GatedRmsNormGradients GatedRmsNormBackward(const at::Tensor& dy, const at::Tensor& x,
                                           const at::Tensor& gate, const at::Tensor& weight_V,
                                           double epsilon, at::Tensor dweight_V);

}  // namespace oom
