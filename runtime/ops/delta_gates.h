// The two gates of the delta rule, by token and value head:
//   beta = logistic(b);  g = -e^A_log * softplus(a + dt_bias), the logarithm of the decay, <= 0.
// Backward:
//   db = dbeta * beta * (1 - beta);  da = -dg * e^A_log * softplus'(a + dt_bias);
//   ddt_bias += sum over tokens of da;  dA_log += sum over tokens of dg * g.
// Shapes: T tokens, N value heads; b, a, beta, g [T, N], A_log, dt_bias [N]. beta and g are wide;
// beta is rounded to b's type first, as the published models do. softplus is linear above 20.
// Keeps nothing: both are recomputed.

#pragma once

#include "runtime/ops/aten.h"

namespace oom {

struct DeltaGateInput {
  at::Tensor b_TN;
  at::Tensor a_TN;
  at::Tensor a_log_N;
  at::Tensor dt_bias_N;
};

struct DeltaGates {
  at::Tensor beta_TN;
  at::Tensor log_decay_TN;
};

struct DeltaGateGradients {
  at::Tensor b_TN;  // In b's and a's type.
  at::Tensor a_TN;
};

DeltaGates DeltaGatesForward(const DeltaGateInput& input);

// `dgates` are the gradients of beta and g. Those of A_log and dt_bias (wide) accumulate.
DeltaGateGradients DeltaGatesBackward(const DeltaGates& dgates, const DeltaGateInput& input,
                                      at::Tensor da_log_N, at::Tensor ddt_bias_N);

}  // namespace oom
