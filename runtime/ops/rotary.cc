#include "runtime/ops/rotary.h"

#include "runtime/ops/precision.h"

namespace oom {

namespace {

// Each step in the published models' order and in the frequency's own type.
at::Tensor YarnFrequency(const at::Tensor& power, const RotaryRule& rule) {
  const YarnScaling& yarn = *rule.yarn;
  const YarnRamp ramp = YarnRampOf(yarn, rule.size, rule.theta);
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

RotaryTable MakeRotaryTable(const at::Tensor& positions_T, const RotaryRule& rule,
                            at::ScalarType type) {
  const at::TensorOptions wide = positions_T.options().dtype(WideType(type));
  const at::Tensor exponent =
      at::arange(0, rule.size, 2, wide).div_(static_cast<double>(rule.size));
  const at::Tensor power = at::pow(rule.theta, exponent);
  at::Tensor frequency = rule.yarn ? YarnFrequency(power, rule) : at::reciprocal(power);
  frequency.narrow(0, rule.pair_count, rule.size / 2 - rule.pair_count).zero_();
  const at::Tensor angle =
      at::mul(positions_T.to(wide.dtype()).unsqueeze(1), frequency).unsqueeze(1);
  at::Tensor cosine = at::cos(angle);
  at::Tensor sine = at::sin(angle);
  if (rule.yarn) {
    cosine.mul_(rule.yarn->attention_factor);
    sine.mul_(rule.yarn->attention_factor);
  }
  return {.cosine = cosine.to(type), .sine = sine.to(type)};
}

at::Tensor RotaryForward(const at::Tensor& x_TNd, const RotaryTable& table) {
  const int64_t half = table.cosine.size(2);
  const int64_t unturned = x_TNd.size(2) - 2 * half;
  const at::Tensor first = x_TNd.narrow(2, 0, half);
  const at::Tensor second = x_TNd.narrow(2, half, half);
  at::Tensor y = at::empty(x_TNd.sizes(), x_TNd.options());
  at::Tensor y_first = y.narrow(2, 0, half);
  at::Tensor y_second = y.narrow(2, half, half);
  // Products are rounded one by one before the sum, as the published models do in BF16.
  at::mul_out(y_first, first, table.cosine).sub_(at::mul(second, table.sine));
  at::mul_out(y_second, second, table.cosine).add_(at::mul(first, table.sine));
  if (unturned > 0) y.narrow(2, 2 * half, unturned).copy_(x_TNd.narrow(2, 2 * half, unturned));
  return y;
}

at::Tensor RotaryBackward(const at::Tensor& dy_TNd, const RotaryTable& table) {
  return RotaryForward(dy_TNd, {.cosine = table.cosine, .sine = at::neg(table.sine)});
}

}  // namespace oom
