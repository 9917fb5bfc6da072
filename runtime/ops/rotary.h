// Rotary position embedding, rotate-half form.
// Pairs (i, i + d/2) turn by the angle position * theta^(-2i/d):
//   y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin.
// With YaRN (runtime/model/yarn.h) the frequencies of slow pairs are lower, and cos and sin stand
// for themselves times the attention factor, in both directions. Backward turns by the opposite
// angle:
//   dx1 = dy1 cos + dy2 sin,  dx2 = dy2 cos - dy1 sin.
// Shapes: x, y [T, N, d], T tokens, N heads; cos, sin [T, 1, d/2]. Keeps nothing.

#pragma once

#include <optional>

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

// Angles are computed wide, cosine and sine then rounded to the activations' type.
struct RotaryTable {
  at::Tensor cosine;
  at::Tensor sine;
};

RotaryTable MakeRotaryTable(const at::Tensor& positions_T, int64_t head_size, double theta,
                            at::ScalarType type,
                            const std::optional<YarnScaling>& yarn = std::nullopt);
// Of the model.
RotaryTable MakeRotaryTable(const ModelDescription& model, const at::Tensor& positions_T,
                            at::ScalarType type);

at::Tensor RotaryForward(const at::Tensor& x_TNd, const RotaryTable& table);
at::Tensor RotaryBackward(const at::Tensor& dy_TNd, const RotaryTable& table);

}  // namespace oom
