#include "runtime/model/yarn.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace oom {

double YarnAttentionFactor(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

YarnScaling MakeYarn(double factor, int64_t original_positions) {
  return {.factor = factor,
          .original_positions = original_positions,
          .attention_factor = YarnAttentionFactor(factor)};
}

YarnRamp YarnRampOf(const YarnScaling& yarn, int64_t head_size, double theta) {
  const auto size = static_cast<double>(head_size);
  // The pair that makes this many turns over the original context.
  const auto pair_of = [&](double turns) {
    const double wavelength = static_cast<double>(yarn.original_positions) / turns;
    return size * std::log(wavelength / (2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
  };
  YarnRamp ramp{.low = pair_of(yarn.beta_fast), .high = pair_of(yarn.beta_slow)};
  if (yarn.truncate) ramp = {.low = std::floor(ramp.low), .high = std::ceil(ramp.high)};
  ramp.low = std::max(ramp.low, 0.0);
  ramp.high = std::min(ramp.high, size - 1.0);
  if (ramp.low == ramp.high) ramp.high += 0.001;
  return ramp;
}

}  // namespace oom
