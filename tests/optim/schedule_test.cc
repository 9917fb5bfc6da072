#include "runtime/optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace oom {
namespace {

constexpr ScheduleKind kKinds[] = {ScheduleKind::kConstant, ScheduleKind::kLinear,
                                   ScheduleKind::kCosine, ScheduleKind::kWarmupStableDecay};

Schedule Make(ScheduleKind kind) {
  return {.kind = kind,
          .peak_learning_rate = 2.0,
          .warmup_steps = 10,
          .total_steps = 110,
          .minimum_ratio = 0.1,
          .decay_fraction = 0.2};
}

TEST(ScheduleTest, WarmUpRisesLinearlyFromTheFirstStepToThePeak) {
  for (const ScheduleKind kind : kKinds) {
    EXPECT_DOUBLE_EQ(LearningRate(Make(kind), 0), 2.0 * 1 / 10);
    EXPECT_DOUBLE_EQ(LearningRate(Make(kind), 4), 2.0 * 5 / 10);
    EXPECT_DOUBLE_EQ(LearningRate(Make(kind), 9), 2.0);
    EXPECT_DOUBLE_EQ(LearningRate(Make(kind), 10), 2.0);  // x = 0.
  }
}

TEST(ScheduleTest, WithoutWarmUpTheFirstStepHasThePeak) {
  for (const ScheduleKind kind : kKinds) {
    Schedule schedule = Make(kind);
    schedule.warmup_steps = 0;
    EXPECT_DOUBLE_EQ(LearningRate(schedule, 0), 2.0);
  }
}

TEST(ScheduleTest, CosineAtFixedPoints) {
  const Schedule schedule = Make(ScheduleKind::kCosine);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 35),
                   2.0 * (0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2));       // x = 1/4.
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 60), 2.0 * (0.1 + 0.9 / 2));  // x = 1/2.
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 85), 2.0 * (0.1 + 0.9 * (1 - std::sqrt(0.5)) / 2));
  EXPECT_NEAR(LearningRate(schedule, 109), 0.2, 1e-3);
}

TEST(ScheduleTest, LinearAtFixedPoints) {
  const Schedule schedule = Make(ScheduleKind::kLinear);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 35), 2.0 * (1 - 0.9 * 0.25));
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 60), 2.0 * 0.55);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 109), 2.0 * (1 - 0.9 * 0.99));
}

TEST(ScheduleTest, ConstantStaysAtThePeak) {
  const Schedule schedule = Make(ScheduleKind::kConstant);
  EXPECT_EQ(LearningRate(schedule, 60), 2.0);
  EXPECT_EQ(LearningRate(schedule, 109), 2.0);
}

// Stable until x = 0.8 (step 90), then linear to a tenth of the peak.
TEST(ScheduleTest, WarmupStableDecayAtFixedPoints) {
  const Schedule schedule = Make(ScheduleKind::kWarmupStableDecay);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 60), 2.0);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 90), 2.0);
  EXPECT_NEAR(LearningRate(schedule, 100), 2.0 * (1 - 0.9 * 0.5), 1e-14);
  EXPECT_NEAR(LearningRate(schedule, 105), 2.0 * (1 - 0.9 * 0.75), 1e-14);
}

// A run that is extended past its schedule, or whose warm-up is as long as the run, has a defined
// rate.
TEST(ScheduleTest, PastTheEndTheRateOfTheEndIsKept) {
  EXPECT_NEAR(LearningRate(Make(ScheduleKind::kCosine), 110), 0.2, 1e-15);
  EXPECT_NEAR(LearningRate(Make(ScheduleKind::kCosine), 500), 0.2, 1e-15);
  EXPECT_NEAR(LearningRate(Make(ScheduleKind::kLinear), 500), 0.2, 1e-15);
  EXPECT_NEAR(LearningRate(Make(ScheduleKind::kWarmupStableDecay), 500), 0.2, 1e-15);
  Schedule all_warmup = Make(ScheduleKind::kLinear);
  all_warmup.warmup_steps = all_warmup.total_steps;
  EXPECT_DOUBLE_EQ(LearningRate(all_warmup, 109), 2.0);
  EXPECT_NEAR(LearningRate(all_warmup, 110), 0.2, 1e-15);
}

TEST(ScheduleTest, DecayFractionAtItsEdges) {
  Schedule schedule = Make(ScheduleKind::kWarmupStableDecay);
  schedule.decay_fraction = 0.0;
  EXPECT_EQ(LearningRate(schedule, 109), 2.0);
  schedule.decay_fraction = 1.0;
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 60), LearningRate(Make(ScheduleKind::kLinear), 60));
}

TEST(ScheduleTest, RatesNeverRiseAfterTheWarmUp) {
  for (const ScheduleKind kind : kKinds) {
    const Schedule schedule = Make(kind);
    for (int64_t step = 10; step < 120; ++step) {
      EXPECT_LE(LearningRate(schedule, step + 1), LearningRate(schedule, step)) << step;
      EXPECT_GE(LearningRate(schedule, step), 0.2 - 1e-12) << step;
    }
  }
}

}  // namespace
}  // namespace oom
