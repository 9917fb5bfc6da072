#include "runtime/ops/rotary.h"

#include "runtime/ops/precision.h"

namespace oom {

namespace {

// Each step in the published models' order and in the frequency's own type.
at::Tensor YarnFrequency(const at::Tensor& power, const YarnScaling& yarn, int64_t head_size,
                         double theta) {
  const YarnRamp ramp = YarnRampOf(yarn, head_size, theta);
  const at::Tensor fast = at::arange(power.size(0), power.options())
                              .sub_(ramp.low)
                              .div_(ramp.high - ramp.low)
                              .clamp_(0, 1)
                              .neg_()
                              .add_(1);
  const at::Tensor slow = at::rsub(fast, 1);
  return at::reciprocal(at::mul(power, yarn.factor))
      .mul_(slow)
      .add_(at::reciprocal(power).mul_(fast));
}

}  // namespace

RotaryTable MakeRotaryTable(const at::Tensor& positions_T, int64_t head_size, double theta,
                            at::ScalarType type, const std::optional<YarnScaling>& yarn) {
  const at::TensorOptions wide = positions_T.options().dtype(WideType(type));
  const at::Tensor exponent =
      at::arange(0, head_size, 2, wide).div_(static_cast<double>(head_size));
  const at::Tensor power = at::pow(theta, exponent);
  const at::Tensor frequency =
      yarn ? YarnFrequency(power, *yarn, head_size, theta) : at::reciprocal(power);
  const at::Tensor angle =
      at::mul(positions_T.to(wide.dtype()).unsqueeze(1), frequency).unsqueeze(1);
  at::Tensor cosine = at::cos(angle);
  at::Tensor sine = at::sin(angle);
  if (yarn) {
    cosine.mul_(yarn->attention_factor);
    sine.mul_(yarn->attention_factor);
  }
  return {.cosine = cosine.to(type), .sine = sine.to(type)};
}

RotaryTable MakeRotaryTable(const ModelDescription& model, const at::Tensor& positions_T,
                            at::ScalarType type) {
  return MakeRotaryTable(positions_T, model.head_size, model.rope_theta, type, model.yarn);
}

at::Tensor RotaryForward(const at::Tensor& x_TNd, const RotaryTable& table) {
  const int64_t half = x_TNd.size(2) / 2;
  const at::Tensor first = x_TNd.narrow(2, 0, half);
  const at::Tensor second = x_TNd.narrow(2, half, half);
  at::Tensor y = at::empty(x_TNd.sizes(), x_TNd.options());
  at::Tensor y_first = y.narrow(2, 0, half);
  at::Tensor y_second = y.narrow(2, half, half);
  // Products are rounded one by one before the sum, as the published models do in BF16.
  at::mul_out(y_first, first, table.cosine).sub_(at::mul(second, table.sine));
  at::mul_out(y_second, second, table.cosine).add_(at::mul(first, table.sine));
  return y;
}

at::Tensor RotaryBackward(const at::Tensor& dy_TNd, const RotaryTable& table) {
  return RotaryForward(dy_TNd, {.cosine = table.cosine, .sine = at::neg(table.sine)});
}

}  // namespace oom
