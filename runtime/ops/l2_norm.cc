#include "runtime/ops/l2_norm.h"

#include "runtime/ops/precision.h"

namespace oom {
namespace {

at::Tensor ReciprocalLength(const at::Tensor& wide_x, double epsilon) {
  return at::mul(wide_x, wide_x).sum(-1, /*keepdim=*/true).add_(epsilon).rsqrt_();
}

}  // namespace

at::Tensor L2NormForward(const at::Tensor& x, double epsilon) {
  const at::Tensor wide_x = Wide(x);
  return at::mul(wide_x, ReciprocalLength(wide_x, epsilon));
}

at::Tensor L2NormBackward(const at::Tensor& dy, const at::Tensor& x, double epsilon) {
  const at::Tensor wide_x = Wide(x);
  const at::Tensor wide_dy = Wide(dy);
  const at::Tensor r = ReciprocalLength(wide_x, epsilon);
  const at::Tensor y = at::mul(wide_x, r);
  const at::Tensor along = at::mul(wide_dy, y).sum(-1, /*keepdim=*/true);
  return at::addcmul(wide_dy, y, along, -1).mul_(r);
}

}  // namespace oom
