// Final norm, logits and cross entropy, by chunk of tokens, forward and backward in one pass:
//   z = RMSNorm(x) Wh.T (then wide), or with a cap C: C tanh(u / C) of that product u;  loss = sum
//   over valid targets of logsumexp(z) - z_target; dz = scale * (softmax(z) - onehot(target)), 0
//   where the target is ignored; with a cap du = dz (1 - (z / C)^2), else du = dz; dWh += du.T n;
//   dn = du Wh;  dx = norm backward of dn.
// The loss is a sum, not a mean: the number of valid targets is the global batch's, so the caller
// passes scale = 1 / that number. There is no residual: dx is the whole gradient of x. Shapes: T
// tokens, H hidden, V vocabulary. No [T, V] tensor exists, only [chunk, V].

#pragma once

#include <cstdint>

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"
#include "runtime/ops/layer.h"

namespace oom {

// Weights, or their wide gradients. With a tied embedding `head` is the embedding's.
struct HeadTensors {
  at::Tensor final_norm;  // [H]
  at::Tensor head;        // [V, H]
};

struct HeadLossOptions {
  double gradient_scale = 1.0;
  int64_t chunk_tokens = 1024;
  TokenRange tokens;
};

struct HeadLossResult {
  at::Tensor loss_sum;       // FP64 scalar: over the valid targets of the range.
  at::Tensor valid_targets;  // int64 scalar.
  at::Tensor dx_TH;          // Of the range's rows, in x's type; undefined without gradients.
};

// `target_T` int64, -1: ignored. `gradients` null: loss only (evaluation).
HeadLossResult HeadLoss(const ModelDescription& model, const HeadTensors& weights,
                        const at::Tensor& x_TH, const at::Tensor& target_T,
                        const HeadLossOptions& options, HeadTensors* gradients);

// The logits themselves, in x's type; for comparisons on small batches.
at::Tensor HeadLogits(const ModelDescription& model, const HeadTensors& weights,
                      const at::Tensor& x_TH);

}  // namespace oom
