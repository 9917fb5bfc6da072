// Cross entropy of logits in place, as runtime/ops/head_loss:
//   loss_t = logsumexp(z_t) - z_t[target];  z_t <- scale * (softmax(z_t) - onehot(target)).
// With a cap C the logits are u, and z = C tanh(u / C):
//   u_t <- scale * (softmax(z_t) - onehot(target)) * (1 - (z_t / C)^2).
// A target of -1 is ignored: loss 0, gradient 0. z, softmax and loss are FP32; the gradient is
// rounded once to T (BF16 or FP32). Shapes: T tokens, V vocabulary; logits [T, V] contiguous.
// A row is read once and written once: it stays in the registers of one block up to V = 65,536
// (BF16) or 32,768 (FP32), and of a cluster of up to eight, on compute capability 9.0, up to eight
// times that. Longer rows and rows that are not made of 16-byte vectors are read twice. The order
// of summation follows from V, the type, the alignment and that choice.
// REQUIRES: targets below V.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct CrossEntropyShape {
  int64_t tokens = 0;
  int64_t vocabulary = 0;
  float logit_cap = 0.0f;  // C; 0: none.
};

void CrossEntropyInPlace(const CrossEntropyShape& shape, __nv_bfloat16* logits_TV,
                         const int64_t* target_T, float scale, float* loss_T, cudaStream_t stream);
void CrossEntropyInPlace(const CrossEntropyShape& shape, float* logits_TV, const int64_t* target_T,
                         float scale, float* loss_T, cudaStream_t stream);

// The same losses, bit for bit; logits are left alone.
void CrossEntropyLoss(const CrossEntropyShape& shape, const __nv_bfloat16* logits_TV,
                      const int64_t* target_T, float* loss_T, cudaStream_t stream);
void CrossEntropyLoss(const CrossEntropyShape& shape, const float* logits_TV,
                      const int64_t* target_T, float* loss_T, cudaStream_t stream);

// loss_sum += the sum of loss_T in FP64, valid_targets += the number of targets that are not
// ignored.
void SumLosses(int64_t tokens, const float* loss_T, const int64_t* target_T, double* loss_sum,
               int64_t* valid_targets, cudaStream_t stream);

}  // namespace oom
