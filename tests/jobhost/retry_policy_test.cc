#include "server/jobhost/retry_policy.h"

#include <gtest/gtest.h>

namespace oom {
namespace {

RetryPolicy Policy(int max_failures) {
  return RetryPolicy({.max_failures = max_failures,
                      .backoff_initial_seconds = 10.0,
                      .backoff_max_seconds = 600.0});
}

TEST(RetryPolicyTest, BackoffDoublesFromTenSecondsToTenMinutes) {
  RetryPolicy policy = Policy(100);
  const double longest[] = {10, 20, 40, 80, 160, 320, 600, 600};
  for (int i = 0; i < 8; ++i) {
    const auto decision = policy.OnFailure("WORKER_CRASHED", i, 0.999999999);
    EXPECT_TRUE(decision.retry);
    EXPECT_NEAR(decision.delay_seconds, longest[i], 1e-3) << i;
  }
}

TEST(RetryPolicyTest, JitterIsFull) {
  EXPECT_EQ(Policy(3).OnFailure("WORKER_CRASHED", 0, 0.0).delay_seconds, 0.0);
  EXPECT_DOUBLE_EQ(Policy(3).OnFailure("WORKER_CRASHED", 0, 0.25).delay_seconds, 2.5);
}

TEST(RetryPolicyTest, EveryAllowedFailureIsRetriedAndTheNextOneIsFinal) {
  for (const int max_failures : {1, 3, 5}) {
    RetryPolicy policy = Policy(max_failures);
    for (int i = 0; i < max_failures; ++i) {
      EXPECT_TRUE(policy.OnFailure("GPU_FAULT", i, 0.5).retry) << i;
    }
    const auto last = policy.OnFailure("GPU_FAULT", 99, 0.5);
    EXPECT_FALSE(last.retry);
    EXPECT_EQ(last.reason, "RETRIES_EXHAUSTED");
  }
}

TEST(RetryPolicyTest, WithNoRetriesTheFirstReasonStands) {
  const auto decision = Policy(0).OnFailure("WORKER_HUNG", 0, 0.5);
  EXPECT_FALSE(decision.retry);
  EXPECT_EQ(decision.reason, "WORKER_HUNG");
}

TEST(RetryPolicyTest, TwoFailuresInARowAtOneDurableStepAreFinal) {
  RetryPolicy policy = Policy(10);
  EXPECT_TRUE(policy.OnFailure("WORKER_CRASHED", 0, 0.5).retry);
  EXPECT_TRUE(policy.OnFailure("WORKER_CRASHED", 100, 0.5).retry);
  const auto decision = policy.OnFailure("NON_FINITE_LOSS", 100, 0.5);
  EXPECT_FALSE(decision.retry);
  EXPECT_EQ(decision.reason, "RETRIES_EXHAUSTED");
  EXPECT_NE(decision.explanation.find("100"), std::string::npos);
}

TEST(RetryPolicyTest, FailuresOfEarlierJobHostsCount) {
  RetryPolicy policy({.max_failures = 3, .failure_count = 3, .last_failure_durable_step = 5});
  EXPECT_FALSE(policy.OnFailure("WORKER_CRASHED", 6, 0.5).retry);
  RetryPolicy same_step({.max_failures = 3, .failure_count = 1, .last_failure_durable_step = 5});
  EXPECT_EQ(same_step.OnFailure("WORKER_CRASHED", 5, 0.5).reason, "RETRIES_EXHAUSTED");
}

TEST(RetryPolicyTest, WhatTheSameInputCanOnlyRepeatIsNeverRetried) {
  for (const char* reason :
       {"INVALID_INPUT", "OUT_OF_HOST_MEMORY", "OUT_OF_GPU_MEMORY", "CHECKPOINT_CORRUPT"}) {
    const auto decision = Policy(3).OnFailure(reason, 0, 0.5);
    EXPECT_FALSE(decision.retry) << reason;
    EXPECT_EQ(decision.reason, reason);
  }
}

}  // namespace
}  // namespace oom
