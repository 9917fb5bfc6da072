// Load-balancing loss over all routed layers together, N = tokens summed over layers:
//   f_e = choices of e / N,  P_e = mean of p_e,  loss = E * sum_e f_e P_e   (uniform routing: K).
// Backward (f is a constant):
//   dz_t += coefficient * E / N * p_t * (f - <f, p_t>).
// The gradient needs f over all layers, so stats are gathered in the forward pass, and each layer's
// term is local in the backward pass. Shapes: E experts, T tokens; p [T, E] wide.

#pragma once

#include <cstdint>

#include "runtime/ops/aten.h"

namespace oom {

// Sums over layers and parts; add them up over ranks field by field. With everybody's counts and
// tokens beside one rank's probabilities, LoadBalanceLoss is that rank's share.
struct RouterStats {
  at::Tensor count_E;        // int64: choices of each expert. Undefined until the first layer.
  at::Tensor probability_E;  // Wide: sum of p.
  int64_t tokens = 0;        // N.
};

// The loss's gradient as each layer's backward needs it. A coefficient of 0: no such loss.
struct LoadBalanceTerm {
  double coefficient = 0.0;  // With whatever scale the main loss has.
  at::Tensor fraction_E;     // f, wide.
  int64_t tokens = 0;        // N.
};

// E * sum_e f_e P_e, without the coefficient: an FP64 scalar where the stats are, so that nothing
// waits for a device. REQUIRES: stats.tokens > 0.
at::Tensor LoadBalanceLoss(const RouterStats& stats);

LoadBalanceTerm MakeLoadBalanceTerm(const RouterStats& stats, double coefficient);

// dlogits_TE += the gradient at probabilities p.
void AddLoadBalanceGradient(const LoadBalanceTerm& term, const at::Tensor& probability_TE,
                            at::Tensor dlogits_TE);

}  // namespace oom
