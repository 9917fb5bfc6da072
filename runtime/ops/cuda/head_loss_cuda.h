// The head of head_loss.h on the GPU: a chunk's logits become their own gradient in place. That is
// rounded to BF16 before the weight's gradient, which the composite is not.

#pragma once

#include "runtime/ops/head_loss.h"

namespace oom {

HeadLossResult CudaHeadLoss(const ModelDescription& model, const HeadTensors& weights,
                            const at::Tensor& x_TH, const at::Tensor& target_T,
                            const HeadLossOptions& options, HeadTensors* gradients);

}  // namespace oom
