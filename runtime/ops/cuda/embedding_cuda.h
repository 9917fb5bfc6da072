// The embedding's gradient by row on the GPU, as embedding.h.

#pragma once

#include "runtime/ops/embedding.h"

namespace oom {

RowGradient CudaEmbeddingBackwardByRow(const at::Tensor& dy_TH, const at::Tensor& token_T);

}  // namespace oom
