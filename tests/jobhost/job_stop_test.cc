// Stops and checkpoints that the daemon asks for.
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/jobhost/job_fixture.h"

namespace oom {
namespace {

class JobStopTest : public JobFixture {
 protected:
  JobStopTest() {
    start_.mutable_spec()->set_steps(1000000);
    start_.mutable_spec()->mutable_checkpoint()->set_every_steps(0);
  }
  void RunTo(int64_t step) {
    StartHost();
    ASSERT_TRUE(daemon_->Connect());
    ASSERT_TRUE(daemon_->ReadUntil([&] { return daemon_->progress().step() >= step; }));
  }
};

TEST_F(JobStopTest, AStopWithACheckpointLosesNoStep) {
  RunTo(3);
  daemon_->Stop(v1::JOB_STATE_CANCELLED, true);
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(daemon_->States(), "STARTING RUNNING STOPPING CANCELLED");
  EXPECT_EQ(end->reason(), "USER_CANCEL");
  EXPECT_EQ(end->step(), end->durable_step()) << end->message();
  EXPECT_EQ(WaitForHost(), 0);
  EXPECT_TRUE(HasCheckpoint(output(), end->step()));
  EXPECT_EQ(StepLines(output()).size(), static_cast<size_t>(end->step()));
}

TEST_F(JobStopTest, ASuspendedJobGoesOnWhereItStopped) {
  RunTo(3);
  daemon_->Stop(v1::JOB_STATE_SUSPENDED, true);
  const auto suspended = daemon_->WaitForEnd();
  ASSERT_TRUE(suspended.has_value());
  EXPECT_EQ(suspended->state(), v1::JOB_STATE_SUSPENDED);
  ASSERT_EQ(WaitForHost(), 0);
  const auto before = StepLines(output());

  start_.mutable_spec()->set_steps(suspended->step() + 5);
  start_.set_first_attempt(2);
  start_.set_next_transition(suspended->number() + 1);
  FakeDaemon next(socket_path());
  StartHost();
  ASSERT_TRUE(next.Connect());
  const auto end = next.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->message();
  EXPECT_EQ(next.transitions()[1].step(), suspended->step());
  EXPECT_EQ(WaitForHost(), 0);
  const auto after = StepLines(output());
  ASSERT_EQ(after.size(), before.size() + 5);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), after.begin()));
}

TEST_F(JobStopTest, AStopNowTakesNoCheckpoint) {
  RunTo(3);
  daemon_->Stop(v1::JOB_STATE_CANCELLED, false);
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(end->durable_step(), 0);
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobStopTest, ASecondStopMeansNow) {
  // The worker never finishes the step, so only the second stop can end it.
  StartHost({"OOM_FAKE_WORKER=0 1 60 hang"});
  ASSERT_TRUE(daemon_->Connect());
  ASSERT_TRUE(daemon_->ReadUntil([&] { return daemon_->progress().step() >= 1; }));
  daemon_->Stop(v1::JOB_STATE_CANCELLED, true);
  daemon_->Stop(v1::JOB_STATE_CANCELLED, false);
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobStopTest, AStopDuringTheBackoffEndsTheJobAtOnce) {
  start_.set_backoff_initial_seconds(100000.0);
  start_.set_backoff_max_seconds(100000.0);
  StartHost({"OOM_FAKE_WORKER=0 1 60 kill"});
  ASSERT_TRUE(daemon_->Connect());
  ASSERT_TRUE(daemon_->WaitForState(v1::JOB_STATE_RECOVERING));
  daemon_->Stop(v1::JOB_STATE_CANCELLED, true);
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobStopTest, ACheckpointOnRequestIsAnsweredWhenItIsDurable) {
  RunTo(2);
  daemon_->RequestCheckpoint(77);
  ASSERT_TRUE(daemon_->ReadUntil([&] { return !daemon_->checkpoints().empty(); }));
  const auto& done = daemon_->checkpoints().front();
  EXPECT_EQ(done.request(), 77);
  EXPECT_EQ(done.code(), 0) << done.message();
  EXPECT_TRUE(HasCheckpoint(output(), done.step()));
  // Training went on meanwhile.
  EXPECT_TRUE(daemon_->ReadUntil([&] { return daemon_->progress().step() > done.step() + 2; }));
  daemon_->Stop(v1::JOB_STATE_CANCELLED, false);
  ASSERT_TRUE(daemon_->WaitForEnd().has_value());
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobStopTest, SigtermSuspendsTheJobWithACheckpoint) {
  RunTo(2);
  ::kill(host_pid(), SIGTERM);
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUSPENDED);
  EXPECT_EQ(end->step(), end->durable_step());
  EXPECT_EQ(WaitForHost(), 0);
}

}  // namespace
}  // namespace oom
