// The Gated DeltaNet mixer of a normed sequence segment, without norm and residual:
//   m = x Wqkv.T;  u = silu(causal convolution of m);  q, k, v = parts of u;
//   q, k of length 1 by head;  beta, g from x Wb.T, x Wa.T (delta_gates.h);
//   o = gated delta rule;  n = RMSNorm(o) * silu(x Wz.T) by value head;  y = n Wo.T.
// Backward in reverse order; each part is linear in its gradient, so segments add up:
//   dn = dy Wo, dWo += dy.T n;  do, dz;  dq, dk, dv, dbeta, dg;  du;  dm;
//   dx = dm Wqkv + dz Wz + db Wb + da Wa, dWqkv += dm.T x, ...
// Shapes: T tokens, H hidden, G key heads, N value heads, K and V their sizes, J taps, D documents,
// C = 2GK + NV channels (q, then k, then v, each head after head), P = J - 1.
// Activations are all of one type; parameter gradients accumulate (+=) and are wide.
// Thread-safe: no state but the arguments. Gradient mode is off.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/ops/aten.h"

namespace oom {

struct GatedDeltaNetShape {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // A multiple of key_heads.
  int64_t key_size = 0;
  int64_t value_size = 0;
  double rms_epsilon = 1e-6;

  int64_t key_width() const { return key_heads * key_size; }
  int64_t value_width() const { return value_heads * value_size; }
};

// The weights, or their gradients in the same shapes.
struct GatedDeltaNetTensors {
  at::Tensor query_key_value;  // [C, H]
  at::Tensor gate;             // [N*V, H], z.
  at::Tensor beta;             // [N, H], b.
  at::Tensor decay;            // [N, H], a.
  at::Tensor convolution;      // [C, 1, J]
  at::Tensor a_log;            // [N]; like dt_bias and norm perhaps wide in a narrow model.
  at::Tensor dt_bias;          // [N]
  at::Tensor norm;             // [V]; as a gradient undefined: not wanted.
  at::Tensor output;           // [H, N*V]
};

// What each document carries from segment to segment, or its gradient (wide).
struct GatedDeltaNetState {
  at::Tensor convolution_DPC;  // The last rows of m, in the activations' type.
  at::Tensor rule_DNKV;        // Wide.
};

// What backward needs. u and the gates are recomputed.
struct GatedDeltaNetSaved {
  GatedDeltaNetState state;  // As forward was given it.
  at::Tensor input_TH;
  at::Tensor mixed_TC;  // m.
  at::Tensor gate_TNV;  // z.
  at::Tensor b_TN;
  at::Tensor a_TN;
  at::Tensor attended_TNV;  // o.

  // Of everything that this keeps alive, the input included.
  int64_t bytes() const;
};

struct GatedDeltaNetOutput {
  at::Tensor y_TH;
  GatedDeltaNetState state;  // After each document's last token.
};

struct GatedDeltaNetGradients {
  at::Tensor x_TH;           // Wide.
  GatedDeltaNetState state;  // Of the state before each document; undefined where that was.
};

// `state`: undefined tensors are zeros. `saved` may be null. REQUIRES: at least one token.
GatedDeltaNetOutput GatedDeltaNetForward(const GatedDeltaNetShape& shape,
                                         const GatedDeltaNetTensors& weights,
                                         const at::Tensor& x_TH, const GatedDeltaNetState& state,
                                         const std::vector<int64_t>& cu_seqlens,
                                         GatedDeltaNetSaved* saved);

// `dstate`: of the state after each document; undefined tensors are zeros.
GatedDeltaNetGradients GatedDeltaNetBackward(
    const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights, const at::Tensor& dy_TH,
    const GatedDeltaNetState& dstate, const GatedDeltaNetSaved& saved,
    const std::vector<int64_t>& cu_seqlens, GatedDeltaNetTensors* gradients);

}  // namespace oom
