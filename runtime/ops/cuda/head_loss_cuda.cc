#include "runtime/ops/cuda/head_loss_cuda.h"

#include <algorithm>

#include "runtime/kernels/cross_entropy.h"
#include "runtime/ops/cuda/cuda_tensors.h"

namespace oom {

HeadLossResult CudaHeadLoss(const ModelDescription& model, const HeadTensors& weights,
                            const at::Tensor& x_TH, const at::Tensor& target_T,
                            const HeadLossOptions& options, HeadTensors* gradients) {
  const int64_t count = options.tokens.count < 0 ? x_TH.size(0) : options.tokens.count;
  HeadLossResult result;
  result.loss_sum = at::zeros({}, x_TH.options().dtype(at::kDouble));
  result.valid_targets = at::zeros({}, target_T.options());
  if (gradients != nullptr) result.dx_TH = at::empty({count, x_TH.size(1)}, x_TH.options());

  for (int64_t done = 0; done < count; done += options.chunk_tokens) {
    const int64_t rows = std::min(options.chunk_tokens, count - done);
    const at::Tensor x = x_TH.narrow(0, options.tokens.first + done, rows);
    const at::Tensor target = target_T.narrow(0, options.tokens.first + done, rows);
    const at::Tensor normed_TH = NormForward(x, weights.final_norm, model.norm);
    at::Tensor logits_TV = at::linear(normed_TH, weights.head);
    const at::Tensor loss_T = at::empty({rows}, x.options().dtype(at::kFloat));

    const CrossEntropyShape shape{.tokens = rows,
                                  .vocabulary = logits_TV.size(1),
                                  .logit_cap = static_cast<float>(model.logit_cap)};
    auto* const logits = DeviceData<__nv_bfloat16>(logits_TV);
    const auto* const targets = DeviceData<int64_t>(target);
    if (gradients == nullptr) {
      CrossEntropyLoss(shape, logits, targets, DeviceData<float>(loss_T), OperatorStream());
    } else {
      CrossEntropyInPlace(shape, logits, targets, static_cast<float>(options.gradient_scale),
                          DeviceData<float>(loss_T), OperatorStream());
    }
    SumLosses(rows, DeviceData<float>(loss_T), targets, DeviceData<double>(result.loss_sum),
              DeviceData<int64_t>(result.valid_targets), OperatorStream());
    if (gradients == nullptr) continue;

    AddWeightGradient(gradients->head, logits_TV, normed_TH);
    const at::Tensor dnormed_TH = at::mm(logits_TV, weights.head);
    logits_TV.reset();
    NormBackward({.dy_RH = dnormed_TH,
                  .x_RH = x,
                  .weight_H = weights.final_norm,
                  .rule = model.norm,
                  .dweight_H = gradients->final_norm},
                 result.dx_TH.narrow(0, done, rows));
  }
  return result;
}

}  // namespace oom
