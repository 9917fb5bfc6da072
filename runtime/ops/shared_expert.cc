#include "runtime/ops/shared_expert.h"

#include "runtime/ops/dense_mlp.h"
#include "runtime/ops/precision.h"

namespace oom {

int64_t SharedExpertSaved::bytes() const { return TensorBytes(gate_up_TF) + TensorBytes(logit_T1); }

SharedExpertSaved SharedExpertGateUp(const at::Tensor& normed_TH,
                                     const SharedExpertTensors& weights) {
  return {.gate_up_TF = DenseGateUpForward(normed_TH, weights.gate_up_FH),
          .logit_T1 = at::linear(normed_TH, weights.gate_1H)};
}

at::Tensor SharedExpertForward(const SharedExpertSaved& saved, const SharedExpertTensors& weights) {
  return DenseDownForward(saved.gate_up_TF, weights.down_HI, Activation::kSilu)
      .mul_(at::sigmoid(saved.logit_T1));
}

at::Tensor SharedExpertBackward(const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                                const SharedExpertSaved& saved, const SharedExpertTensors& weights,
                                const SharedExpertTensors& gradients) {
  const at::Tensor share_T1 = at::sigmoid(saved.logit_T1);
  const at::Tensor f_TH = DenseDownForward(saved.gate_up_TF, weights.down_HI, Activation::kSilu);
  const at::Tensor dshare_T1 = at::mul(Wide(dy_TH), Wide(f_TH)).sum(1, /*keepdim=*/true);
  const at::Tensor dlogit_T1 = at::sigmoid_backward(dshare_T1, Wide(share_T1));
  at::Tensor dnormed_TH =
      DenseMlpBackward(at::mul(dy_TH, share_T1), normed_TH, saved.gate_up_TF, weights.gate_up_FH,
                       weights.down_HI, Activation::kSilu, gradients.gate_up_FH, gradients.down_HI);
  AccumulateWeightGradient(gradients.gate_1H, dlogit_T1, normed_TH);
  return dnormed_TH.addmm_(dlogit_T1, Wide(weights.gate_1H));
}

}  // namespace oom
