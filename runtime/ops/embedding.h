// Embedding: y_t = W[token_t].  Backward: dW[token_t] += dy_t, added in token order. Where the
// model scales it, the caller multiplies y, and then dy or the rows' sums, by EmbeddingScale.
// Shapes: T tokens, V vocabulary, H hidden, U distinct tokens of the batch; W [V, H], y [T, H].
// Delivered by row, the weight holds only the batch's rows: then tokens are indices into those
// rows, and the gradient is asked for by row.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

// 1, or the model's scale as a number of the weights' type, which is how the published model
// applies it: Gemma 4's sqrt(2816) is 53.0 in BF16.
double EmbeddingScale(const ModelDescription& model, at::ScalarType type);

at::Tensor EmbeddingForward(const at::Tensor& weight_VH, const at::Tensor& token_T);

void EmbeddingBackward(const at::Tensor& dy_TH, const at::Tensor& token_T, at::Tensor dweight_VH);

// The rows of the gradient that are not zero. A device's operators do not tell the host how many
// there are: theirs have room for T rows, int32 numbers, and those beyond U are undefined. Who knows
// the batch's tokens knows U.
struct RowGradient {
  at::Tensor row_U;   // In the tokens' type, rising.
  at::Tensor sum_UH;  // Wide.
};

RowGradient EmbeddingBackwardByRow(const at::Tensor& dy_TH, const at::Tensor& token_T);

}  // namespace oom
