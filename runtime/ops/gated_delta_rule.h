// The gated delta rule of each document, in chunks of at most 64 tokens. By token, for a value head
// with state S [K, V] and scale s = K^(-1/2):
//   S = e^g_t S;  S = S + beta_t k_t (v_t - S.T k_t).T;  o_t = s S.T q_t.
// By chunk, with G the running sum of g in it, D_ij = e^(G_i - G_j) for j <= i and 0 above,
// A = (1 + strict lower triangle of diag(beta) k k.T)^-1 and B = (A * D) diag(beta):
//   W = v - e^G k S;  R = B W;  P = s D * (q k.T);
//   o = s e^G q S + P R;  S <- e^G_last S + k.T (e^(G_last - G) R).
// Backward, chunks in reverse, E the gradient of the chunk's outgoing state:
//   dR = P.T do + e^(G_last - G) k E;  dW = B.T dR;  dB = dR W.T;  dP = do R.T;
//   dA = D * dB diag(beta);  dL = strict lower triangle of -A.T dA A.T;  Z = diag(beta) dL;
//   dq = s e^G do S.T + (s D * dP) k;  dv = dW;
//   dk = e^(G_last - G) R E.T - e^G dW S.T + (s D * dP).T q + (Z + Z.T) k;
//   dbeta_j = sum_i (D * dB * A)_ij + sum_i (dL * k k.T)_ji;
//   dG: what multiplies e^G, D and e^(G_last - G), times its gradient; dg = reverse sum of dG;
//   E <- e^G_last E + s q.T (e^G do) - k.T (e^G dW).
// A is bounded without the gate in it, since |k| <= 1 and 0 <= beta <= 1; no e^(-G) is formed.
//
// Shapes: T tokens, D documents, G key heads, N value heads (value head n reads key head
// n / (N / G)), K and V a head's sizes; q, k [T, G, K], v, o [T, N, V], g, beta [T, N], states
// [D, N, K, V]. States, gates and all products are wide; o is rounded once, to v's type.
// A chunk ends where a document ends and at every multiple of 64 in the segment: a sequence cut at
// multiples of 64 has the chunks of the uncut one, hence its bits. Products are by chunk and value
// head, so that no order of sums depends on what else is in the segment.
// Forward keeps nothing. Backward runs a document's states forward once more and holds the state at
// each chunk's start.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/ops/aten.h"

namespace oom {

inline constexpr int64_t kDeltaChunkTokens = 64;

struct GatedDeltaRuleInput {
  at::Tensor query_TGK;  // Both of length 1 (l2_norm.h).
  at::Tensor key_TGK;
  at::Tensor value_TNV;
  at::Tensor log_decay_TN;  // g.
  at::Tensor beta_TN;
  at::Tensor state_DNKV;  // Before each document's first token; undefined is zeros.
};

struct GatedDeltaRuleOutput {
  at::Tensor output_TNV;
  at::Tensor state_DNKV;  // After each document's last token, wide.
};

// All wide. Those of q and k are added up over the value heads that read them.
struct GatedDeltaRuleGradients {
  at::Tensor query_TGK;
  at::Tensor key_TGK;
  at::Tensor value_TNV;
  at::Tensor log_decay_TN;
  at::Tensor beta_TN;
  at::Tensor state_DNKV;  // Undefined where the input's state was.
};

// REQUIRES: at least one token.
GatedDeltaRuleOutput GatedDeltaRuleForward(const GatedDeltaRuleInput& input,
                                           const std::vector<int64_t>& cu_seqlens);

// `dstate_DNKV`: gradients of the states after each document; undefined is zeros.
GatedDeltaRuleGradients GatedDeltaRuleBackward(const at::Tensor& doutput_TNV,
                                               const at::Tensor& dstate_DNKV,
                                               const GatedDeltaRuleInput& input,
                                               const std::vector<int64_t>& cu_seqlens);

}  // namespace oom
