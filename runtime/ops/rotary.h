// Rotary position embedding, rotate-half form, of a head's first r elements (RotaryRule):
// pairs (i, i + r/2), i < pair count, turn by the angle position * theta^(-2i/r):
//   y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin;
// all other elements stay.
// With YaRN (runtime/model/yarn.h) the frequencies of slow pairs are lower, and cos and sin stand
// for themselves times the attention factor, in both directions. Backward turns by the opposite
// angle:
//   dx1 = dy1 cos + dy2 sin,  dx2 = dy2 cos - dy1 sin.
// Shapes: x, y [T, N, d], T tokens, N heads; cos, sin [T, 1, r/2]. Keeps nothing.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

// Angles are computed wide, cosine and sine then rounded to the activations' type.
struct RotaryTable {
  at::Tensor cosine;
  at::Tensor sine;
};

RotaryTable MakeRotaryTable(const at::Tensor& positions_T, const RotaryRule& rule,
                            at::ScalarType type);

at::Tensor RotaryForward(const at::Tensor& x_TNd, const RotaryTable& table);
at::Tensor RotaryBackward(const at::Tensor& dy_TNd, const RotaryTable& table);

}  // namespace oom
