// Causal attention on the GPU for heads that no fused kernel of LibTorch takes (d > 256), formulas
// and shapes as causal_attention.h: products of blocks of some thousand rows, those of all query
// heads of a group, with blocks of keys, and an online softmax between them. Never more scores than
// one block has exist; on Hopper (d a multiple of 64) none are written, only probabilities
// (kernels/attention_products.h, elsewhere attention_scores.h). Blocks go over the packed tokens, so
// short documents cost no more launches than long ones. No synchronisation with the host.
// Deterministic: the order of sums follows from the shapes and the documents' boundaries.
// What it takes of memory is in gpu_limits.h.
// q, k, v, o and their gradients BF16 and contiguous, log-sum-exp FP32 [T, N]; d a multiple of 8.

#pragma once

#include "runtime/ops/causal_attention.h"
#include "runtime/ops/gpu_limits.h"
#include "runtime/ops/layer.h"

namespace oom {

struct WideHeadAttentionOptions {
  AttentionRule rule;
  bool portable = false;  // Without Hopper's instructions, even where they exist.
};

AttentionOutput WideHeadAttentionForward(const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                         const at::Tensor& value_TGd, const PackedBatch& batch,
                                         const WideHeadAttentionOptions& options);

AttentionGradients WideHeadAttentionBackward(const at::Tensor& doutput_TNd,
                                             const at::Tensor& query_TNd,
                                             const at::Tensor& key_TGd, const at::Tensor& value_TGd,
                                             const AttentionOutput& forward,
                                             const PackedBatch& batch,
                                             const WideHeadAttentionOptions& options);

}  // namespace oom
