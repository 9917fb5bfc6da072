// The expert that serves all tokens beside the routed ones, behind a gate of its own:
//   f = SwiGLU(n Wgu.T) Wd.T;  s = logistic(n Wg.T);  y = s f.
// Backward:
//   df = s dy;  dz = s (1 - s) <dy, f>;  dn = the MLP's backward of df + dz Wg;  dWg += dz.T n.
// Shapes: T tokens, H hidden, I width, F = 2I; Wg [1, H], z and s [T, 1]. f is recomputed.

#pragma once

#include "runtime/ops/aten.h"

namespace oom {

struct SharedExpertSaved {
  at::Tensor gate_up_TF;
  at::Tensor logit_T1;  // z.

  int64_t bytes() const;
};

// The weights, or their gradients in the same shapes, which accumulate and are wide.
struct SharedExpertTensors {
  at::Tensor gate_up_FH;
  at::Tensor down_HI;
  at::Tensor gate_1H;
};

// All that backward needs.
SharedExpertSaved SharedExpertGateUp(const at::Tensor& normed_TH,
                                     const SharedExpertTensors& weights);

at::Tensor SharedExpertForward(const SharedExpertSaved& saved, const SharedExpertTensors& weights);

// dn, wide.
at::Tensor SharedExpertBackward(const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                                const SharedExpertSaved& saved, const SharedExpertTensors& weights,
                                const SharedExpertTensors& gradients);

}  // namespace oom
