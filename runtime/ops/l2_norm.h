// L2 normalisation of a head's vector: y = x * r, r = (sum(x^2) + epsilon)^(-1/2). Epsilon is added
// to the sum, not to a mean.
// Backward: dx = r * (dy - y * sum(dy * y)).
// Shapes: x, y [..., d]; y and dx are wide. Keeps nothing: r is recomputed.

#pragma once

#include "runtime/ops/aten.h"

namespace oom {

at::Tensor L2NormForward(const at::Tensor& x, double epsilon);

at::Tensor L2NormBackward(const at::Tensor& dy, const at::Tensor& x, double epsilon);

}  // namespace oom
