#include "runtime/ops/cuda/cuda_tensors.h"

#include <c10/cuda/CUDAStream.h>

#include "runtime/kernels/rms_norm.h"

namespace oom {
namespace {

template <class Dy, class Dx, class Residual>
void NormBackward(const NormGradient& gradient, const at::Tensor& dx_RH) {
  const RmsNormShape shape{.rows = gradient.x_RH.size(0), .width = gradient.x_RH.size(1)};
  at::Tensor scratch;
  if (gradient.dweight_H.defined()) {
    scratch = ScratchBytes(RmsNormBackwardScratchBytes(shape), gradient.x_RH);
  }
  RmsNormBackward(
      shape,
      RmsNormBackwardArguments<__nv_bfloat16, Dy, Dx, Residual>{
          .dy_RH = DeviceData<Dy>(gradient.dy_RH),
          .x_RH = DeviceData<__nv_bfloat16>(gradient.x_RH),
          .weight_H = DeviceData<__nv_bfloat16>(gradient.weight_H),
          .scale = gradient.rule.scale,
          .epsilon = static_cast<float>(gradient.rule.epsilon),
          .residual_gradient_RH = DeviceData<Residual>(gradient.residual_gradient_RH),
          .dx_RH = DeviceData<Dx>(dx_RH),
          .dweight_H = DeviceData<float>(gradient.dweight_H),
          .scratch = scratch.defined() ? static_cast<float*>(scratch.data_ptr()) : nullptr},
      OperatorStream());
}

}  // namespace

cudaStream_t OperatorStream() { return c10::cuda::getCurrentCUDAStream().stream(); }

at::Tensor ScratchBytes(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

void AddWeightGradient(at::Tensor gradient_OI, const at::Tensor& dy_RO, const at::Tensor& x_RI) {
  at::addmm_out(gradient_OI, gradient_OI, dy_RO.t(), x_RI, at::kFloat);
}

void AddWideProduct(at::Tensor sum_RI, const at::Tensor& a_RO, const at::Tensor& b_OI) {
  at::addmm_out(sum_RI, sum_RI, a_RO, b_OI, at::kFloat);
}

at::Tensor NormForward(const at::Tensor& x_RH, const at::Tensor& weight_H, const NormRule& rule,
                       const AfterNorm& after) {
  at::Tensor normed_RH = at::empty_like(x_RH);
  RmsNormForward({.rows = x_RH.size(0), .width = x_RH.size(1)},
                 RmsNormForwardArguments<__nv_bfloat16>{
                     .x_RH = DeviceData<__nv_bfloat16>(x_RH),
                     .weight_H = DeviceData<__nv_bfloat16>(weight_H),
                     .scale = rule.scale,
                     .epsilon = static_cast<float>(rule.epsilon),
                     .addend_RH = DeviceData<__nv_bfloat16>(after.addend_RH),
                     .factor = DeviceData<float>(after.factor),
                     .y_RH = DeviceData<__nv_bfloat16>(normed_RH)},
                 OperatorStream());
  return normed_RH;
}

void NormBackward(const NormGradient& gradient, at::Tensor dx_RH) {
  using Narrow = __nv_bfloat16;
  const at::Tensor& residual_RH = gradient.residual_gradient_RH;
  const bool wide_residual = residual_RH.defined() && residual_RH.scalar_type() == at::kFloat;
  const bool wide_dy = gradient.dy_RH.scalar_type() == at::kFloat;
  const bool wide_dx = dx_RH.scalar_type() == at::kFloat;
  OOM_CHECK(wide_dy || !wide_residual);
  if (wide_residual && wide_dx) return NormBackward<float, float, float>(gradient, dx_RH);
  if (wide_residual) return NormBackward<float, Narrow, float>(gradient, dx_RH);
  if (wide_dy && wide_dx) return NormBackward<float, float, Narrow>(gradient, dx_RH);
  if (wide_dy) return NormBackward<float, Narrow, Narrow>(gradient, dx_RH);
  if (wide_dx) return NormBackward<Narrow, float, Narrow>(gradient, dx_RH);
  NormBackward<Narrow, Narrow, Narrow>(gradient, dx_RH);
}

}  // namespace oom
