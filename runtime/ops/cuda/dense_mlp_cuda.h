// Gated MLPs that all tokens pass, on the GPU: formulas and shapes as in runtime/ops/dense_mlp.h.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

// a, of the product of gate and up: any rows, the experts' too.
at::Tensor CudaActivated(const at::Tensor& gate_up_RF, Activation activation);

at::Tensor CudaDenseDown(const at::Tensor& gate_up_TF, const at::Tensor& down_HI,
                         Activation activation);

// Weights, or their gradients.
struct MlpTensors {
  at::Tensor gate_up_FH;
  at::Tensor down_HI;
};

// The gradient of gate and up; the weights' accumulate.
at::Tensor CudaMlpBackward(const MlpTensors& weights, const at::Tensor& dy_TH,
                           const at::Tensor& normed_TH, const at::Tensor& gate_up_TF,
                           Activation activation, const MlpTensors& gradients);

}  // namespace oom
