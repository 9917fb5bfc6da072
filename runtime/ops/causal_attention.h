// Causal softmax attention per document:
//   s_ij = c <q_i, k_j> for j <= i in the same document (with a window: i - window < j),
//   c = d^(-1/2) or as the rule says;
//   P = softmax(s);  o = P v.
// Backward:
//   dv = P.T do;  dS = P * (do v.T - <do_i, o_i>);
//   dq = c dS k;  dk = c dS.T q.
// Shapes: T tokens, N query heads, G key/value heads (query head n uses n / (N / G)), d head size;
// q, o [T, N, d], k, v [T, G, d], log-sum-exp [T, N] (wide).
// Scores are never stored: backward recomputes P from the log-sum-exp. Consecutive documents of one
// length run as one batch. Deterministic for a given number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

struct AttentionRule {
  int64_t window = 0;        // 0: full causal attention.
  double score_scale = 0.0;  // c; 0: d^(-1/2).

  double ScaleOf(int64_t head_size) const;
};

AttentionRule RuleOf(const AttentionDescription& attention);

struct AttentionOutput {
  at::Tensor output_TNd;
  at::Tensor
      logsumexp_TN;  // In the form of the library that made it where a device's operators did.
};

struct AttentionGradients {
  at::Tensor query_TNd;
  at::Tensor key_TGd;
  at::Tensor value_TGd;
};

// `cu_seqlens`: document i is tokens [cu_seqlens[i], cu_seqlens[i + 1]); the first is 0, the last
// T.
AttentionOutput CausalAttentionForward(const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                       const at::Tensor& value_TGd,
                                       const std::vector<int64_t>& cu_seqlens,
                                       const AttentionRule& rule = {});

AttentionGradients CausalAttentionBackward(const at::Tensor& doutput_TNd,
                                           const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                           const at::Tensor& value_TGd,
                                           const AttentionOutput& forward,
                                           const std::vector<int64_t>& cu_seqlens,
                                           const AttentionRule& rule = {});

}  // namespace oom
