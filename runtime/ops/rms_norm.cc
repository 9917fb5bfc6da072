#include "runtime/ops/rms_norm.h"

#include "runtime/ops/precision.h"

namespace oom {
namespace {

at::Tensor ReciprocalRoot(const at::Tensor& wide_x, double epsilon) {
  return at::mul(wide_x, wide_x).mean(-1, /*keepdim=*/true).add_(epsilon).rsqrt_();
}

}  // namespace

at::Tensor RmsNormForward(const at::Tensor& x, const at::Tensor& weight_H, double epsilon) {
  const at::Tensor wide_x = Wide(x);
  at::Tensor normalized = at::mul(wide_x, ReciprocalRoot(wide_x, epsilon)).to(x.scalar_type());
  return normalized.mul_(weight_H);
}

at::Tensor RmsNormBackward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_H,
                           double epsilon, at::Tensor dweight_H) {
  const at::Tensor wide_x = Wide(x);
  const at::Tensor wide_dy = Wide(dy);
  const at::Tensor wide_weight = Wide(weight_H);
  const at::Tensor r = ReciprocalRoot(wide_x, epsilon);
  const at::Tensor normalized = at::mul(wide_x, r);

  const at::Tensor product = at::mul(wide_dy, normalized);
  if (dweight_H.defined()) dweight_H.add_(product.reshape({-1, x.size(-1)}).sum(0));
  const at::Tensor mean =
      at::matmul(product, wide_weight).div_(static_cast<double>(x.size(-1))).unsqueeze(-1);
  return at::mul(wide_dy, wide_weight).addcmul_(normalized, mean, -1).mul_(r);
}

}  // namespace oom
