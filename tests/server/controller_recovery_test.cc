// Hosts that are lost, never started or ended unheard: what is tried again, from where, and when
// the controller gives up.
#include <gtest/gtest.h>

#include <string>

#include "runtime/base/units.h"
#include "tests/server/controller_fixture.h"

namespace oom {
namespace {

using internal::v1::Transition;

TEST_F(ControllerTest, ALostHostIsReplacedAfterABackoffUntilTheBudgetIsUsed) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  for (int failure = 1; failure <= 4; ++failure) {
    Report("a", failure, v1::JOB_STATE_RUNNING, failure * 10);
    Exit("a");
    EXPECT_EQ(Get("a").failure_count(), failure);
    if (failure == 4) break;
    EXPECT_EQ(State("a"), "RECOVERING");
    EXPECT_EQ(Get("a").reason(), "JOB_HOST_LOST");
    EXPECT_EQ(controller_->resources().used_bytes()[0], 1_GiB) << "the pools stay with the job";
    EXPECT_TRUE(launcher_.with_pools.contains(Get("a").uid()));
    Advance(600);
    ASSERT_EQ(launcher_.starts.size(), static_cast<size_t>(failure) + 1);
    EXPECT_EQ(launcher_.starts.back().first_attempt(), failure + 1);
    EXPECT_EQ(launcher_.starts.back().failure_count(), failure);
  }
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Get("a").reason(), "RETRIES_EXHAUSTED");
  EXPECT_TRUE(launcher_.with_pools.empty());
}

TEST_F(ControllerTest, TwoFailuresInARowAtOneDurableStepEndTheJob) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING, 20);
  Exit("a");
  EXPECT_EQ(State("a"), "RECOVERING");
  Restart();  // The memory of the first failure is on the disk.
  EXPECT_EQ(State("a"), "RECOVERING");
  EXPECT_EQ(Get("a").failure_count(), 1);
  Advance(600);
  Report("a", 2, v1::JOB_STATE_RUNNING, 20);
  Exit("a");
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Get("a").reason(), "RETRIES_EXHAUSTED");
  EXPECT_NE(Get("a").message().find("durable step 20"), std::string::npos) << Get("a").message();
}

TEST_F(ControllerTest, ADaemonThatDiedBetweenCommitAndStartStartsTheJobLater) {
  launcher_.start_status = Status(Code::kInternal, "never reached");
  ASSERT_TRUE(Create(NewJob("a")).ok());
  // What the disk had when the daemon died: STARTING, and no host.
  JobRecord& record = store_.jobs.begin()->second;
  record.job.set_state(v1::JOB_STATE_STARTING);
  launcher_.start_status = Status::Ok();
  Restart();
  EXPECT_EQ(State("a"), "STARTING");
  EXPECT_EQ(launcher_.starts.size(), 1U);
  EXPECT_EQ(Get("a").failure_count(), 0);
}

TEST_F(ControllerTest, AnEndThatTheHostWroteDownBeforeItDiedCounts) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  Transition last;
  last.set_number(2);
  last.set_state(v1::JOB_STATE_SUCCEEDED);
  last.set_durable_step(100);
  launcher_.leftovers[Get("a").uid()] = {last};
  launcher_.alive.clear();
  Restart();
  EXPECT_EQ(State("a"), "SUCCEEDED");
  EXPECT_EQ(Get("a").durable_step(), 100);
}

TEST_F(ControllerTest, AHostThatDoesNotLaunchFailsItsJobAndFreesItsPlace) {
  launcher_.start_status = Status(Code::kResourceExhausted, "no memory");
  ASSERT_TRUE(Create(NewJob("a")).ok());
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Get("a").reason(), "OUT_OF_HOST_MEMORY");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
}

}  // namespace
}  // namespace oom
