// Learning rate schedules (engine rules, section 14). Pure functions.

#pragma once

#include <cstdint>

namespace oom {

enum class ScheduleKind { kConstant, kLinear, kCosine, kWarmupStableDecay };

struct Schedule {
  ScheduleKind kind = ScheduleKind::kCosine;
  double peak_learning_rate = 0.0;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  double minimum_ratio = 0.0;
  double decay_fraction = 0.1;  // kWarmupStableDecay only.
};

// Learning rate of step s, counted from 0.
double LearningRate(const Schedule& schedule, int64_t step);

}  // namespace oom
