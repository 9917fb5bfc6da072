// Sizes at which operators of GPUs work in parts, and what they take of memory for it. Pure
// functions of shapes, for the operators and for the planner's memory account, which knows no CUDA.

#pragma once

#include <algorithm>
#include <cstdint>

namespace oom {

// Tokens that one backward of attention takes at once, whole documents.
inline constexpr int64_t kCudnnBackwardTokens = 32768;

// Scores that attention written out by blocks has at a time (blocked_attention.h).
inline constexpr int64_t kBlockedAttentionElements = int64_t{1} << 26;

// The widest heads that cuDNN and FlashAttention take; wider ones are wide_head_attention.h's.
inline constexpr int64_t kFusedHeadSizeMax = 256;

// Blocks of wide heads' attention. Rows of all heads that a product of LibTorch has, at most: with
// the 512 columns of a result, 128 tiles of 128 x 256, about one for each multiprocessor.
inline constexpr int64_t kWideHeadProductRows = 8192;
// And SoftmaxOfProducts, of which a multiprocessor takes 128 rows.
inline constexpr int64_t kWideHeadSoftmaxRows = 2 * kWideHeadProductRows;
// Columns of scores that exist at a time, and what their rows' strides are multiples of.
inline constexpr int64_t kWideHeadScoreColumns = 4096;
inline constexpr int64_t kWideHeadStrideMultiple = 8;

// Tokens whose heads are about `rows` rows.
inline int64_t WideHeadBlockTokens(int64_t rows, int64_t query_heads) {
  const int64_t tokens = std::max<int64_t>(1, rows / query_heads);
  constexpr int64_t kWhole = 64;
  return tokens > kWhole ? tokens / kWhole * kWhole : tokens;
}

inline int64_t WideHeadColumns(int64_t tokens) {
  const int64_t rounded = (std::max<int64_t>(1, tokens) + kWideHeadStrideMultiple - 1) /
                          kWideHeadStrideMultiple * kWideHeadStrideMultiple;
  return std::min(kWideHeadScoreColumns, rounded);
}

struct WideHeadAttentionShape {
  int64_t tokens = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_size = 0;

  int64_t RowsOf(int64_t rows) const {
    return query_heads * std::min(WideHeadBlockTokens(rows, query_heads), tokens);
  }
  int64_t score_bytes() const {
    return RowsOf(kWideHeadProductRows) * WideHeadColumns(tokens) *
           static_cast<int64_t>(sizeof(float));
  }
};

// The most that each takes from LibTorch's allocator beside its results. Forward: scores, and by
// row the query, the output and the three numbers of the softmax.
inline int64_t WideHeadAttentionForwardScratchBytes(const WideHeadAttentionShape& shape) {
  return shape.score_bytes() +
         shape.RowsOf(kWideHeadSoftmaxRows) * (shape.head_size * (2 + 4) + 3 * 4);
}

// Scores and their gradients; by row of a block q, do and dq; dk and dv wide; delta.
inline int64_t WideHeadAttentionBackwardScratchBytes(const WideHeadAttentionShape& shape) {
  return 2 * shape.score_bytes() +
         shape.RowsOf(kWideHeadProductRows) * shape.head_size * (2 + 2 + 4) +
         shape.tokens * (2 * shape.kv_heads * shape.head_size + shape.query_heads) * 4;
}

// Of the gated delta rule's backward (kernels/gated_delta_rule_stages.h), at most: for every chunk
// of 64 tokens and value head three squares, five tiles of tokens, of which one is dO's, and two
// states in FP16, six rows of FP32; each array is rounded up a little.
inline int64_t GatedDeltaRuleBackwardBytes(int64_t chunks, int64_t value_heads) {
  constexpr int64_t kChunk = 64, kHead = 128, kArrays = 13, kAlignment = 256;
  constexpr int64_t kTile =
      (3 * kChunk * kChunk + 5 * kChunk * kHead + 2 * kHead * kHead) * 2 + 6 * kChunk * 4;
  return chunks * value_heads * kTile + kArrays * kAlignment;
}

}  // namespace oom
