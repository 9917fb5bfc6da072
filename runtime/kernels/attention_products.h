// The scores of a block (attention_scores.h) multiplied and turned into probabilities, or with a
// second product into the gradients of scores, in one kernel on Hopper's tensor cores: scores never
// reach memory. Shapes as there; keys are rows first_key, first_key + 1, ... of k and v [T, G, d].
// All bfloat16 and 16-byte aligned, d a multiple of 64. Products are summed in FP32 by the tensor
// cores. Deterministic, thread-safe, no scratch. REQUIRES: HasHopperTensorCores().

#pragma once

#include "runtime/kernels/attention_scores.h"

namespace oom {

// One product: rows of the block times keys.
struct ScoreFactors {
  const __nv_bfloat16* rows_GRd = nullptr;
  const __nv_bfloat16* keys_TGd = nullptr;
};

struct ScoreProductSizes {
  int64_t tokens = 0;  // T
  int64_t head_size = 0;
};

// As a product q k.T and SoftmaxOfScores, with probabilities [G, R, C] where rows are
// block.row_stride elements apart, and one difference: the state's maximum is some whole number
// that the greatest score so far exceeds by less than kSoftmaxHeadroom, rather than that score. So
// it seldom changes; where it does, the probabilities of the row that are already there, and the
// state, are multiplied by a power of two.
inline constexpr float kSoftmaxHeadroom = 32.0f;
void SoftmaxOfProducts(const ScoreBlock& block, const ScoreProductSizes& sizes,
                       const ScoreFactors& factors, bool first, __nv_bfloat16* probabilities_GRC,
                       const SoftmaxState& state, cudaStream_t stream);

// As products q k.T and do v.T and ScoreGradients, with the two results apart, [G, R, C] each.
struct ProductGradientArguments {
  ScoreFactors scores;          // q, k
  ScoreFactors dprobabilities;  // do, v
  const float* logsumexp_TN = nullptr;
  const float* delta_TN = nullptr;
  __nv_bfloat16* probabilities_GRC = nullptr;
  __nv_bfloat16* dscores_GRC = nullptr;
};
void GradientsOfProducts(const ScoreBlock& block, const ScoreProductSizes& sizes,
                         const ProductGradientArguments& arguments, cudaStream_t stream);

}  // namespace oom
