#include "runtime/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace oom {
namespace {

// The share of the peak after the warm-up; x runs from 0 (its end) to 1 (the last step's end).
double ShareOfPeak(const Schedule& schedule, double x) {
  const double r = schedule.minimum_ratio;
  switch (schedule.kind) {
    case ScheduleKind::kConstant:
      return 1.0;
    case ScheduleKind::kLinear:
      return 1.0 - (1.0 - r) * x;
    case ScheduleKind::kCosine:
      return r + (1.0 - r) * (1.0 + std::cos(std::numbers::pi * x)) / 2.0;
    case ScheduleKind::kWarmupStableDecay: {
      const double decay_start = 1.0 - schedule.decay_fraction;
      if (x <= decay_start) return 1.0;
      return 1.0 - (1.0 - r) * (x - decay_start) / schedule.decay_fraction;
    }
  }
  return 1.0;
}

}  // namespace

double LearningRate(const Schedule& schedule, int64_t step) {
  if (step < schedule.warmup_steps) {
    return schedule.peak_learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(schedule.warmup_steps);
  }
  const int64_t remaining_steps = schedule.total_steps - schedule.warmup_steps;
  // A step past the end (or a schedule that is all warm-up) keeps the rate of the end.
  const double x = remaining_steps <= 0
                       ? 1.0
                       : std::min(1.0, static_cast<double>(step - schedule.warmup_steps) /
                                           static_cast<double>(remaining_steps));
  return schedule.peak_learning_rate * ShareOfPeak(schedule, x);
}

}  // namespace oom
