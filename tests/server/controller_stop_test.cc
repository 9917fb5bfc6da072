// Stops, by a client or by the daemon's own shutdown: a job told to stop stays told, whatever its
// host says meanwhile and whether the daemon lives on or not.
#include <gtest/gtest.h>

#include "runtime/base/units.h"
#include "tests/server/controller_fixture.h"

namespace oom {
namespace {

TEST_F(ControllerTest, CancelWithCheckpointThenCancelAgainMeansNow) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Hello("a");
  Report("a", 1, v1::JOB_STATE_RUNNING);
  ASSERT_TRUE(Cancel("a").ok());
  EXPECT_EQ(State("a"), "STOPPING");
  EXPECT_EQ(Get("a").reason(), "USER_CANCEL");
  ASSERT_NE(LastStop(), nullptr);
  EXPECT_TRUE(LastStop()->checkpoint());
  EXPECT_EQ(LastStop()->grace_seconds(), 60);
  EXPECT_EQ(LastStop()->final_state(), v1::JOB_STATE_CANCELLED);
  ASSERT_TRUE(Cancel("a").ok());
  EXPECT_FALSE(LastStop()->checkpoint());
  EXPECT_EQ(LastStop()->grace_seconds(), 0);
  EXPECT_TRUE(launcher_.killed.empty());
  Advance(29);
  EXPECT_TRUE(launcher_.killed.empty());
  Advance(2);
  EXPECT_EQ(launcher_.killed.size(), 1U);
  Exit("a");
  EXPECT_EQ(State("a"), "CANCELLED");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
}

TEST_F(ControllerTest, WhatTheHostSaidBeforeItHeardOfTheStopDoesNotUndoTheStop) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  ASSERT_TRUE(Cancel("a").ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "STOPPING");
  EXPECT_EQ(Acks("a", 1), 1);
  launcher_.sent.clear();
  Hello("a");
  ASSERT_NE(LastStop(), nullptr) << "a host that connects after the cancel must hear of it";
  Report("a", 2, v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(State("a"), "CANCELLED");
}

TEST_F(ControllerTest, AStopOutlivesTheDaemon) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  ASSERT_TRUE(Call(&Controller::SuspendJob, "a").ok());
  launcher_.sent.clear();
  Restart();
  EXPECT_EQ(State("a"), "STOPPING");
  Hello("a");
  ASSERT_NE(LastStop(), nullptr);
  EXPECT_EQ(LastStop()->final_state(), v1::JOB_STATE_SUSPENDED);
  Report("a", 2, v1::JOB_STATE_SUSPENDED, 40);
  EXPECT_EQ(State("a"), "SUSPENDED");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
  // Resumed while the old host is still on its way out: the new one waits for that.
  ASSERT_TRUE(Call(&Controller::ResumeJob, "a").ok());
  EXPECT_EQ(State("a"), "QUEUED");
  EXPECT_EQ(launcher_.starts.size(), 1U);
  Exit("a");
  EXPECT_EQ(State("a"), "STARTING");
  ASSERT_EQ(launcher_.starts.size(), 2U);
  EXPECT_EQ(launcher_.starts[1].first_attempt(), 2);
  EXPECT_EQ(launcher_.starts[1].next_transition(), 3);
}

TEST_F(ControllerTest, ACancelledEtagMismatchIsAborted) {
  const Result<v1::Job> created = Create(NewJob("a"));
  v1::CancelJobRequest request;
  request.set_name("jobs/a");
  request.set_etag(created->etag());  // It has started since.
  Status status;
  controller_->CancelJob(request, [&](Result<v1::Job> reply) { status = reply.status(); });
  EXPECT_EQ(status.code(), Code::kAborted);
  EXPECT_EQ(State("a"), "STARTING");
}

TEST_F(ControllerTest, ACancelBetweenTwoHostsEndsTheJobAtOnce) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Exit("a");
  ASSERT_EQ(State("a"), "RECOVERING");
  ASSERT_TRUE(Cancel("a").ok());
  EXPECT_EQ(State("a"), "CANCELLED");
  Advance(1000);
  EXPECT_EQ(launcher_.starts.size(), 1U);
}

TEST_F(ControllerTest, AnEphemeralDaemonSuspendsItsJobsAndTheNextOneQueuesThemAgain) {
  options_.ephemeral = true;
  Restart();
  ASSERT_TRUE(Create(NewJob("a", 4_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("b", 4_GiB)).ok());
  Hello("a");
  Report("a", 1, v1::JOB_STATE_RUNNING);
  controller_->BeginShutdown();
  EXPECT_EQ(State("a"), "STOPPING");
  EXPECT_TRUE(LastStop()->checkpoint());
  EXPECT_FALSE(controller_->idle());
  EXPECT_EQ(Create(NewJob("c")).status().code(), Code::kUnavailable);
  Report("a", 2, v1::JOB_STATE_SUSPENDED, 12);
  Exit("a");
  EXPECT_TRUE(controller_->idle());
  EXPECT_EQ(State("b"), "QUEUED") << "nothing starts during a shutdown";
  Restart();
  EXPECT_EQ(State("a"), "STARTING");
  EXPECT_EQ(Get("a").durable_step(), 12);
}

TEST_F(ControllerTest, AServiceDaemonLeavesJobsAloneWhenItStops) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  controller_->BeginShutdown();
  EXPECT_EQ(LastStop(), nullptr);
  Restart();
  EXPECT_EQ(State("a"), "RUNNING");
  EXPECT_EQ(launcher_.starts.size(), 1U);
}

}  // namespace
}  // namespace oom
