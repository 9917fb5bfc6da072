#include "runtime/ops/rms_norm.h"

#include "runtime/ops/precision.h"

namespace oom {
namespace {

at::Tensor ReciprocalRoot(const at::Tensor& wide_x, double epsilon) {
  return at::mul(wide_x, wide_x).mean(-1, /*keepdim=*/true).add_(epsilon).rsqrt_();
}

// Wide; undefined without a weight.
at::Tensor WideScale(const at::Tensor& weight_H, const NormRule& rule) {
  if (!weight_H.defined()) return {};
  const at::Tensor wide = Wide(weight_H);
  return rule.scale == NormScale::kOnePlusWeight ? at::add(wide, 1.0) : wide;
}

}  // namespace

at::Tensor RmsNormForward(const at::Tensor& x, const at::Tensor& weight_H, const NormRule& rule) {
  const at::Tensor wide_x = Wide(x);
  at::Tensor normalized = at::mul(wide_x, ReciprocalRoot(wide_x, rule.epsilon));
  if (weight_H.defined() && rule.scale == NormScale::kWeightAfterRounding) {
    return normalized.to(x.scalar_type()).mul_(weight_H);
  }
  if (weight_H.defined()) normalized.mul_(WideScale(weight_H, rule));
  return normalized.to(x.scalar_type());
}

at::Tensor RmsNormBackward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_H,
                           const NormRule& rule, at::Tensor dweight_H) {
  const at::Tensor wide_x = Wide(x);
  const at::Tensor wide_dy = Wide(dy);
  const at::Tensor scale = WideScale(weight_H, rule);
  const at::Tensor r = ReciprocalRoot(wide_x, rule.epsilon);
  const at::Tensor normalized = at::mul(wide_x, r);

  const at::Tensor product = at::mul(wide_dy, normalized);
  if (dweight_H.defined()) dweight_H.add_(product.reshape({-1, x.size(-1)}).sum(0));
  if (!scale.defined()) {
    return at::addcmul(wide_dy, normalized, product.mean(-1, /*keepdim=*/true), -1).mul_(r);
  }
  const at::Tensor mean =
      at::matmul(product, scale).div_(static_cast<double>(x.size(-1))).unsqueeze(-1);
  return at::mul(wide_dy, scale).addcmul_(normalized, mean, -1).mul_(r);
}

}  // namespace oom
