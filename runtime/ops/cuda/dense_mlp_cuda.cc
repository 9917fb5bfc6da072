#include "runtime/ops/cuda/dense_mlp_cuda.h"

#include "runtime/kernels/swiglu.h"
#include "runtime/ops/cuda/cuda_tensors.h"

namespace oom {

at::Tensor CudaActivated(const at::Tensor& gate_up_RF, Activation activation) {
  const at::Tensor a_RI =
      at::empty({gate_up_RF.size(0), gate_up_RF.size(1) / 2}, gate_up_RF.options());
  SwigluForward({.rows = a_RI.size(0), .width = a_RI.size(1), .activation = activation},
                DeviceData<__nv_bfloat16>(gate_up_RF), DeviceData<__nv_bfloat16>(a_RI),
                OperatorStream());
  return a_RI;
}

at::Tensor CudaDenseDown(const at::Tensor& gate_up_TF, const at::Tensor& down_HI,
                         Activation activation) {
  return at::mm(CudaActivated(gate_up_TF, activation), down_HI.t());
}

at::Tensor CudaMlpBackward(const MlpTensors& weights, const at::Tensor& dy_TH,
                           const at::Tensor& normed_TH, const at::Tensor& gate_up_TF,
                           Activation activation, const MlpTensors& gradients) {
  // Becomes the activation itself.
  at::Tensor da_TI = at::mm(dy_TH, weights.down_HI);
  const at::Tensor dgate_up_TF = at::empty_like(gate_up_TF);
  SwigluBackward(
      {.rows = da_TI.size(0), .width = da_TI.size(1), .activation = activation},
      SwigluBackwardArguments<__nv_bfloat16>{.da_RI = DeviceData<__nv_bfloat16>(da_TI),
                                             .gate_up_RF = DeviceData<__nv_bfloat16>(gate_up_TF),
                                             .dgate_up_RF = DeviceData<__nv_bfloat16>(dgate_up_TF),
                                             .weighted_RI = DeviceData<__nv_bfloat16>(da_TI)},
      OperatorStream());
  AddWeightGradient(gradients.down_HI, dy_TH, da_TI);
  da_TI.reset();
  AddWeightGradient(gradients.gate_up_FH, dgate_up_TF, normed_TH);
  return dgate_up_TF;
}

}  // namespace oom
