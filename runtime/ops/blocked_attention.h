// Causal softmax attention (causal_attention.h) written out as matrix products by block of query
// rows, for tensors that no fused kernel takes: scores are wide and live for one block.
// Shapes: B documents of one length S, N query heads, G key/value heads, d head size; q, o
// [B, N, S, d], k, v [B, G, S, d], log-sum-exp [B, N, S] (wide). Any device and type. The order of
// sums follows from the shapes.

#pragma once

#include <cstdint>
#include <tuple>

#include "runtime/ops/aten.h"
#include "runtime/ops/causal_attention.h"
#include "runtime/ops/gpu_limits.h"

namespace oom {

struct BlockedAttentionOptions {
  AttentionRule rule;
  int64_t block_elements = kBlockedAttentionElements;  // Scores that live at a time, at most.
};

// o and the log-sum-exp.
std::tuple<at::Tensor, at::Tensor> BlockedAttentionForward(const at::Tensor& query_BNSd,
                                                           const at::Tensor& key_BGSd,
                                                           const at::Tensor& value_BGSd,
                                                           const BlockedAttentionOptions& options);

// dq, dk, dv.
std::tuple<at::Tensor, at::Tensor, at::Tensor> BlockedAttentionBackward(
    const at::Tensor& doutput_BNSd, const at::Tensor& query_BNSd, const at::Tensor& key_BGSd,
    const at::Tensor& value_BGSd, const at::Tensor& output_BNSd, const at::Tensor& logsumexp_BNS,
    const BlockedAttentionOptions& options);

}  // namespace oom
