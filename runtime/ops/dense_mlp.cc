#include "runtime/ops/dense_mlp.h"

#include "runtime/ops/precision.h"
#include "runtime/ops/swiglu.h"

namespace oom {

at::Tensor DenseGateUpForward(const at::Tensor& normed_TH, const at::Tensor& gate_up_FH) {
  return at::linear(normed_TH, gate_up_FH);
}

at::Tensor DenseDownForward(const at::Tensor& gate_up_TF, const at::Tensor& down_HI,
                            Activation activation) {
  return at::linear(SwigluForward(gate_up_TF, activation), down_HI);
}

at::Tensor DenseMlpBackward(const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                            const at::Tensor& gate_up_TF, const at::Tensor& gate_up_FH,
                            const at::Tensor& down_HI, Activation activation,
                            at::Tensor dgate_up_FH, at::Tensor ddown_HI) {
  AccumulateWeightGradient(ddown_HI, dy_TH, SwigluForward(gate_up_TF, activation));
  const at::Tensor dgate_up_TF = SwigluBackward(at::mm(dy_TH, down_HI), gate_up_TF, activation);
  AccumulateWeightGradient(dgate_up_FH, dgate_up_TF, normed_TH);
  return Wide(at::mm(dgate_up_TF, gate_up_FH));
}

}  // namespace oom
