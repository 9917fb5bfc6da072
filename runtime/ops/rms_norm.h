// RMSNorm with a plain weight: y = xh * w, xh = x * r, r = (mean(x^2) + epsilon)^(-1/2).
// Backward, with a = dy * w:  dx = r * (a - xh * mean(xh * a));  dw += sum over rows of dy * xh.
// Shapes: x, y [..., H], w [H]; H is the hidden size, or a head's size for the q and k norms.
// xh is rounded to x's type before it meets w, as the published models do.
// Keeps nothing: r is recomputed.

#pragma once

#include "runtime/ops/aten.h"

namespace oom {

at::Tensor RmsNormForward(const at::Tensor& x, const at::Tensor& weight_H, double epsilon);

// dx, wide (not yet rounded, so that a residual gradient can be added first). Linear in dy, so the
// dx of partial dy add up. `dweight_H` accumulates; undefined: not wanted.
at::Tensor RmsNormBackward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_H,
                           double epsilon, at::Tensor dweight_H);

}  // namespace oom
