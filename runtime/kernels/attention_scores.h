// What blocked attention does between its matrix products (formulas: causal_attention.h): the
// online softmax of a block of scores (Milakov, Gimelshein 2018; Rabe, Staats 2021), its gradient,
// and the sums of rows around them.
//
// A block has the query heads of kv group g as rows of one matrix: row r is token first_token +
// r / H and query head g * H + r % H, of H heads a group; its columns are the keys from first_key
// on. Row r sees the keys of its token's document up to itself, the last `window` of them.
// Shapes: T tokens, N query heads, G groups, H = N / G, R rows a group, C columns, d head size.
//
// Exponentials and sums are FP32 with the hardware's exponential, probabilities and gradients leave
// rounded to bfloat16. Deterministic: each sum has one order. No scratch, thread-safe.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

inline constexpr int64_t kScoreColumnsMax = 4096;

struct ScoreBlock {
  const int64_t* positions_T = nullptr;  // Of each token within its document.
  int64_t group_count = 0;               // G
  int64_t heads_of_group = 0;            // H
  int64_t rows = 0;                      // R = H * tokens
  int64_t columns = 0;                   // C, at most kScoreColumnsMax.
  int64_t row_stride = 0;                // Elements between rows of [G, R, C]: a multiple of 8.
  int64_t first_token = 0;
  int64_t first_key = 0;
  int64_t window = 0;  // 0: the whole document.
  float scale = 1.0f;  // Of scores, before the softmax.
};

// What forward keeps of a row between blocks of keys: the greatest score so far, in powers of two
// (score * scale * log2(e)), the sum of all 2^(score - greatest), the same as they were rounded to
// multiply the values, and the sum of values so multiplied. Divided by the second sum, a row that
// sees one value alone gets it exactly; the first one is for the log-sum-exp.
struct SoftmaxState {
  float* maximum_GR = nullptr;
  float* sum_GR = nullptr;
  float* weight_GR = nullptr;
  float* output_GRd = nullptr;  // 16-byte aligned.
  int64_t head_size = 0;        // A multiple of 4.
};

// Replaces each row's scores by the probabilities in units of 2^(greatest score so far), bfloat16,
// in the first half of the row's bytes, and brings the state to those units: the caller then adds
// the product of probabilities and values to the output. `first`: there is no state yet; the caller
// overwrites the output. Keys that a row doesn't see get 0, whatever their score is.
void SoftmaxOfScores(const ScoreBlock& block, bool first, float* scores_GRC,
                     const SoftmaxState& state, cudaStream_t stream);

// After the last block of keys: o = output / weight and log-sum-exp = log of the sum of
// exp(score * scale), natural, into rows of the whole.
void FinishSoftmax(const ScoreBlock& block, const SoftmaxState& state, __nv_bfloat16* output_TNd,
                   float* logsumexp_TN, cudaStream_t stream);

// delta = <do, o> of `rows` rows. `head_size` is a multiple of 8, rows are 16-byte aligned.
void AttentionDelta(int64_t rows, int64_t head_size, const __nv_bfloat16* doutput_Rd,
                    const __nv_bfloat16* output_Rd, float* delta_R, cudaStream_t stream);

// From scores q k.T and do v.T to P and scale * P * (do v.T - delta), both bfloat16: the first in
// the first half of the bytes of the row of scores, the second in the second half (2 * row_stride
// bytes later).
struct ScoreGradientArguments {
  float* scores_GRC = nullptr;
  const float* dprobabilities_GRC = nullptr;  // The same strides.
  const float* logsumexp_TN = nullptr;
  const float* delta_TN = nullptr;
};
void ScoreGradients(const ScoreBlock& block, const ScoreGradientArguments& arguments,
                    cudaStream_t stream);

}  // namespace oom
