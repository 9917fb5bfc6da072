// A job's way through the controller: its states, its wait for resources, its checkpoints; and that
// nothing is acknowledged before it is on the disk.
#include "server/oomd/controller.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "runtime/base/units.h"
#include "tests/server/controller_fixture.h"

namespace oom {
namespace {

TEST_F(ControllerTest, AJobRunsFromQueuedToSucceededAndGivesEverythingBack) {
  const Result<v1::Job> created = Create(NewJob("a"));
  ASSERT_TRUE(created.ok());
  EXPECT_EQ(created->state(), v1::JOB_STATE_QUEUED);
  ASSERT_EQ(launcher_.starts.size(), 1U);
  EXPECT_EQ(launcher_.starts[0].first_attempt(), 1);
  EXPECT_EQ(launcher_.starts[0].job_directory(), "/state/jobs/" + created->uid());
  EXPECT_EQ(State("a"), "STARTING");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 1_GiB);
  Hello("a");
  Report("a", 1, v1::JOB_STATE_STARTING);
  Report("a", 2, v1::JOB_STATE_RUNNING);
  Report("a", 3, v1::JOB_STATE_STOPPING, 100);
  Report("a", 4, v1::JOB_STATE_SUCCEEDED, 100);
  EXPECT_EQ(State("a"), "SUCCEEDED");
  EXPECT_EQ(Get("a").progress(), 1.0);
  EXPECT_TRUE(Get("a").has_end_time());
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
  EXPECT_TRUE(launcher_.with_pools.empty());
  Exit("a");
  EXPECT_EQ(State("a"), "SUCCEEDED");
  EXPECT_TRUE(controller_->idle());
}

TEST_F(ControllerTest, ATransitionIsRecordedOnceAndAcknowledgedEachTime) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  const size_t events = store_.events.size();
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(store_.events.size(), events);
  EXPECT_EQ(Acks("a", 1), 2);
}

TEST_F(ControllerTest, ATerminalStateNeverChanges) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  Report("a", 2, v1::JOB_STATE_FAILED);
  Report("a", 3, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Acks("a", 3), 1) << "an ignored transition must not be repeated for ever";
  EXPECT_EQ(Cancel("a").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Call(&Controller::SuspendJob, "a").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Call(&Controller::ResumeJob, "a").status().code(), Code::kFailedPrecondition);
}

TEST_F(ControllerTest, TheSecondJobWaitsForMemoryAndStartsWhenItIsFree) {
  ASSERT_TRUE(Create(NewJob("a", 3_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("b", 3_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("c", 1_GiB)).ok());
  EXPECT_EQ(Get("b").reason(), "WAITING_RESOURCES");
  EXPECT_EQ(Get("b").blocked_by(),
            "host memory of numa 0: needs 3.00 GiB, 1.00 GiB of 4.00 GiB free");
  EXPECT_EQ(Get("c").reason(), "WAITING_PRIORITY");
  EXPECT_EQ(Get("c").blocked_by(), "jobs/b starts first");
  EXPECT_EQ(Get("c").jobs_ahead(), 1);
  Report("a", 1, v1::JOB_STATE_RUNNING);
  Report("a", 2, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(State("b"), "STARTING");
  EXPECT_EQ(State("c"), "STARTING");
}

TEST_F(ControllerTest, HigherPriorityStartsFirst) {
  ASSERT_TRUE(Create(NewJob("running", 4_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("low", 4_GiB, -5)).ok());
  ASSERT_TRUE(Create(NewJob("high", 4_GiB, 5)).ok());
  ASSERT_TRUE(Cancel("running", v1::CANCEL_MODE_NOW).ok());
  Exit("running");
  EXPECT_EQ(State("high"), "STARTING");
  EXPECT_EQ(State("low"), "QUEUED");
}

TEST_F(ControllerTest, ManyChangesAreOneCommit) {
  const int before = store_.commit_count;
  int answers = 0;
  for (int i = 0; i < 50; ++i) {
    controller_->CreateJob(NewJob("j" + std::to_string(i), 4_GiB),
                           [&](Result<v1::Job> reply) { answers += reply.ok(); });
  }
  EXPECT_EQ(answers, 0) << "acknowledged before the commit";
  controller_->Flush();
  EXPECT_EQ(answers, 50);
  EXPECT_EQ(store_.commit_count, before + 2) << "the jobs, and the first one's start";
}

TEST_F(ControllerTest, AFailedCommitChangesNothingAndRefusesEverythingAfterIt) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  store_.fail_from_now = true;
  const Result<v1::Job> created = Create(NewJob("b"));
  EXPECT_EQ(created.status().code(), Code::kUnavailable);
  EXPECT_EQ(view_->Get("jobs/b"), nullptr);
  EXPECT_EQ(launcher_.starts.size(), 1U);
  EXPECT_TRUE(controller_->store_failed());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "STARTING") << "memory is ahead of the disk";
  EXPECT_EQ(Acks("a", 1), 0);
  EXPECT_EQ(Cancel("a").status().code(), Code::kUnavailable);
  // After the repair the daemon starts from what the disk has.
  store_.fail_from_now = false;
  Restart();
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "RUNNING");
  EXPECT_TRUE(Create(NewJob("b")).ok());
}

TEST_F(ControllerTest, ACheckpointIsAnsweredWhenItIsDurable) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Result<internal::v1::CheckpointDone> answer = Status(Code::kInternal, "none");
  const auto ask = [&] {
    controller_->CheckpointJob(
        "jobs/a", [&](Result<internal::v1::CheckpointDone> done) { answer = std::move(done); });
  };
  ask();
  EXPECT_EQ(answer.status().code(), Code::kFailedPrecondition);
  Hello("a");
  Report("a", 1, v1::JOB_STATE_RUNNING);
  ask();
  ASSERT_TRUE(launcher_.sent.back().frame.has_checkpoint());
  internal::v1::CheckpointDone done;
  done.set_request(launcher_.sent.back().frame.checkpoint().request());
  done.set_step(30);
  done.set_path("/out/checkpoints/step-00000030");
  controller_->OnCheckpointDone(Get("a").uid(), done);
  EXPECT_FALSE(answer.ok()) << "answered before it was recorded";
  controller_->Flush();
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->step(), 30);
  EXPECT_EQ(store_.jobs.begin()->second.job.durable_step(), 30);
  ask();
  Report("a", 2, v1::JOB_STATE_FAILED);
  EXPECT_EQ(answer.status().code(), Code::kAborted);
}

}  // namespace
}  // namespace oom
