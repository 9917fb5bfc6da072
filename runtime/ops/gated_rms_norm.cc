#include "runtime/ops/gated_rms_norm.h"

#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"

namespace oom {
namespace {

at::Tensor Normalized(const at::Tensor& x, double epsilon) {
  const at::Tensor wide_x = Wide(x);
  const at::Tensor square = at::mul(wide_x, wide_x).mean(-1, /*keepdim=*/true);
  return at::mul(wide_x, square.add_(epsilon).rsqrt_());
}

}  // namespace

at::Tensor GatedRmsNormForward(const at::Tensor& x, const at::Tensor& gate,
                               const at::Tensor& weight_V, double epsilon) {
  const at::Tensor normalized = Normalized(x, epsilon).to(x.scalar_type());
  // Promotes: a wide weight of a narrow model is not rounded.
  const at::Tensor scaled = Wide(at::mul(normalized, weight_V));
  return at::mul(scaled, at::silu(Wide(gate))).to(x.scalar_type());
}

GatedRmsNormGradients GatedRmsNormBackward(const at::Tensor& dy, const at::Tensor& x,
                                           const at::Tensor& gate, const at::Tensor& weight_V,
                                           double epsilon, at::Tensor dweight_V) {
  const at::Tensor wide_gate = Wide(gate);
  const at::Tensor wide_dy = Wide(dy);
  const at::Tensor dsilu = at::mul(wide_dy, Wide(weight_V)).mul_(Normalized(x, epsilon));
  return {
      .x = RmsNormBackward(at::mul(wide_dy, at::silu(wide_gate)), x, weight_V,
                           {.epsilon = epsilon}, dweight_V),
      .gate = at::silu_backward(dsilu, wide_gate).to(gate.scalar_type())};
}

}  // namespace oom
