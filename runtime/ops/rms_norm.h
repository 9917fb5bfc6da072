// RMSNorm: y = xh * s, xh = x * r, r = (mean(x^2) + epsilon)^(-1/2), s = w, 1 + w, or 1 without a
// weight. Backward, with a = dy * s:  dx = r * (a - xh * mean(xh * a));  dw += sum over rows of dy
// * xh. Shapes: x, y [..., H], w [H]; H is the hidden size, or a head's size for the q and k norms.
// What is rounded when follows the rule, as the published models do.
// Keeps nothing: r is recomputed.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

// `weight_H`: undefined: none.
at::Tensor RmsNormForward(const at::Tensor& x, const at::Tensor& weight_H, const NormRule& rule);

// dx, wide (not yet rounded, so that a residual gradient can be added first). Linear in dy, so the
// dx of partial dy add up. `dweight_H` accumulates; undefined: not wanted.
at::Tensor RmsNormBackward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_H,
                           const NormRule& rule, at::Tensor dweight_H);

}  // namespace oom
