#include "runtime/ops/swiglu.h"

namespace oom {

at::Tensor SwigluForward(const at::Tensor& gate_up_RF) {
  const int64_t width = gate_up_RF.size(1) / 2;
  return at::silu(gate_up_RF.narrow(1, 0, width)).mul_(gate_up_RF.narrow(1, width, width));
}

at::Tensor SwigluBackward(const at::Tensor& dy_RI, const at::Tensor& gate_up_RF) {
  const int64_t width = gate_up_RF.size(1) / 2;
  const at::Tensor gate = gate_up_RF.narrow(1, 0, width);
  const at::Tensor up = gate_up_RF.narrow(1, width, width);
  at::Tensor gradient = at::empty(gate_up_RF.sizes(), gate_up_RF.options());
  at::Tensor dgate = gradient.narrow(1, 0, width);
  at::Tensor dup = gradient.narrow(1, width, width);
  at::mul_out(dup, dy_RI, at::silu(gate));
  at::silu_backward_out(dgate, at::mul(dy_RI, up), gate);
  return gradient;
}

}  // namespace oom
