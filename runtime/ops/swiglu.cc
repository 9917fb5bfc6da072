#include "runtime/ops/swiglu.h"

namespace oom {
namespace {

constexpr char kTanhForm[] = "tanh";

at::Tensor Activated(const at::Tensor& gate_RI, Activation activation) {
  return activation == Activation::kGeluTanh ? at::gelu(gate_RI, kTanhForm) : at::silu(gate_RI);
}

}  // namespace

at::Tensor SwigluForward(const at::Tensor& gate_up_RF, Activation activation) {
  const int64_t width = gate_up_RF.size(1) / 2;
  return Activated(gate_up_RF.narrow(1, 0, width), activation)
      .mul_(gate_up_RF.narrow(1, width, width));
}

at::Tensor SwigluBackward(const at::Tensor& dy_RI, const at::Tensor& gate_up_RF,
                          Activation activation) {
  const int64_t width = gate_up_RF.size(1) / 2;
  const at::Tensor gate = gate_up_RF.narrow(1, 0, width);
  const at::Tensor up = gate_up_RF.narrow(1, width, width);
  at::Tensor gradient = at::empty(gate_up_RF.sizes(), gate_up_RF.options());
  at::Tensor dgate = gradient.narrow(1, 0, width);
  at::Tensor dup = gradient.narrow(1, width, width);
  at::mul_out(dup, dy_RI, Activated(gate, activation));
  if (activation == Activation::kGeluTanh) {
    at::gelu_backward_out(dgate, at::mul(dy_RI, up), gate, kTanhForm);
  } else {
    at::silu_backward_out(dgate, at::mul(dy_RI, up), gate);
  }
  return gradient;
}

}  // namespace oom
