#include "runtime/ops/head_loss.h"

#include <algorithm>

#include "runtime/base/check.h"
#include "runtime/ops/device_operators.h"
#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"

namespace oom {
namespace {

struct ChunkLoss {
  at::Tensor loss_sum;
  at::Tensor valid;
  at::Tensor dlogits_TV;  // Wide; written where the log-probabilities were.
};

// Of capped logits, wide: z / C = tanh(u / C).
at::Tensor CappedShare(const at::Tensor& product_TV, double cap) {
  return at::div(Wide(product_TV), cap).tanh_();
}

// dz to du, in place. `share_TV` is used up.
void UncapGradient(at::Tensor gradient_TV, at::Tensor share_TV) {
  gradient_TV.mul_(share_TV.square_().neg_().add_(1.0));
}

ChunkLoss CrossEntropy(const at::Tensor& logits_TV, const at::Tensor& target_T, double scale,
                       bool want_gradient) {
  at::Tensor log_probability_TV = at::log_softmax(logits_TV, 1, WideType(logits_TV.scalar_type()));
  const at::Tensor valid_T1 = target_T.ge(0).unsqueeze(1);
  const at::Tensor index_T1 = target_T.clamp_min(0).unsqueeze(1);
  ChunkLoss result;
  result.loss_sum = log_probability_TV.gather(1, index_T1)
                        .masked_fill_(valid_T1.logical_not(), 0.0)
                        .sum(at::kDouble)
                        .neg_();
  result.valid = valid_T1.sum();
  if (want_gradient) {
    const at::Tensor scale_T1 = valid_T1.to(log_probability_TV.scalar_type()).mul_(scale);
    result.dlogits_TV = log_probability_TV.exp_().mul_(scale_T1);
    result.dlogits_TV.scatter_add_(1, index_T1, at::neg(scale_T1));
  }
  return result;
}

}  // namespace

at::Tensor HeadLogits(const ModelDescription& model, const HeadTensors& weights,
                      const at::Tensor& x_TH) {
  const at::Tensor product_TV =
      at::linear(RmsNormForward(x_TH, weights.final_norm, model.norm), weights.head);
  if (model.logit_cap == 0.0) return product_TV;
  return CappedShare(product_TV, model.logit_cap).mul_(model.logit_cap).to(x_TH.scalar_type());
}

HeadLossResult HeadLoss(const ModelDescription& model, const HeadTensors& weights,
                        const at::Tensor& x_TH, const at::Tensor& target_T,
                        const HeadLossOptions& options, HeadTensors* gradients) {
  OOM_CHECK(options.chunk_tokens > 0);
  if (const DeviceOperators* device = OperatorsFor(x_TH)) {
    return device->head_loss(model, weights, x_TH, target_T, options, gradients);
  }
  const int64_t first = options.tokens.first;
  const int64_t count = options.tokens.count < 0 ? x_TH.size(0) : options.tokens.count;
  HeadLossResult result;
  result.loss_sum = at::zeros({}, x_TH.options().dtype(at::kDouble));
  result.valid_targets = at::zeros({}, target_T.options());
  if (gradients != nullptr) result.dx_TH = at::empty({count, x_TH.size(1)}, x_TH.options());

  for (int64_t done = 0; done < count; done += options.chunk_tokens) {
    const int64_t rows = std::min(options.chunk_tokens, count - done);
    const at::Tensor x = x_TH.narrow(0, first + done, rows);
    const at::Tensor normed_TH = RmsNormForward(x, weights.final_norm, model.norm);
    at::Tensor logits_TV = at::linear(normed_TH, weights.head);
    at::Tensor share_TV;
    if (model.logit_cap != 0.0) {
      share_TV = CappedShare(logits_TV, model.logit_cap);
      logits_TV = at::mul(share_TV, model.logit_cap);
    }
    const ChunkLoss chunk = CrossEntropy(logits_TV, target_T.narrow(0, first + done, rows),
                                         options.gradient_scale, gradients != nullptr);
    logits_TV.reset();
    result.loss_sum.add_(chunk.loss_sum);
    result.valid_targets.add_(chunk.valid);
    if (gradients == nullptr) continue;

    if (share_TV.defined()) UncapGradient(chunk.dlogits_TV, share_TV);
    AccumulateWeightGradient(gradients->head, chunk.dlogits_TV, normed_TH);
    const at::Tensor dnormed_TH = at::mm(chunk.dlogits_TV.to(x.scalar_type()), weights.head);
    result.dx_TH.narrow(0, done, rows)
        .copy_(
            RmsNormBackward(dnormed_TH, x, weights.final_norm, model.norm, gradients->final_norm));
  }
  return result;
}

}  // namespace oom
