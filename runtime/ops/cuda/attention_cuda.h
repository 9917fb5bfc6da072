// Causal attention on the GPU, as causal_attention.h: cuDNN where all documents have one length and
// see all of it (with heads of more than 128: on Hopper, of a multiple of 128 tokens), else
// LibTorch's FlashAttention, which alone takes packed documents and a window, and in deterministic
// mode (LibTorch's, not the one that only warns) has the same bits in every run; heads wider than
// both take by wide_head_attention.h. The log-sum-exp stays as its library left it; backward takes
// the same library again.

#pragma once

#include "runtime/ops/causal_attention.h"
#include "runtime/ops/layer.h"

namespace oom {

// q, k after norm and rotation; all contiguous, BF16.
AttentionOutput CudaAttentionForward(const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                     const at::Tensor& value_TGd, const PackedBatch& batch,
                                     const AttentionRule& rule);

AttentionGradients CudaAttentionBackward(const at::Tensor& doutput_TNd, const at::Tensor& query_TNd,
                                         const at::Tensor& key_TGd, const at::Tensor& value_TGd,
                                         const AttentionOutput& forward, const PackedBatch& batch,
                                         const AttentionRule& rule);

}  // namespace oom
