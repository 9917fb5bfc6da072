// Jobs that go well: what is there when they end, and that going on from a checkpoint changes
// nothing.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/base/file.h"
#include "tests/jobhost/job_fixture.h"

namespace oom {
namespace {

using JobEndTest = JobFixture;

TEST_F(JobEndTest, AJobRunsToItsEndAndLeavesEverythingThatIsPromised) {
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  EXPECT_EQ(daemon_->hello().uid(), "0190-test-uid");
  EXPECT_EQ(daemon_->hello().pid(), host_pid());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(daemon_->States(), "STARTING RUNNING STOPPING SUCCEEDED") << end->message();
  EXPECT_EQ(end->step(), 12);
  EXPECT_EQ(end->durable_step(), 12);
  EXPECT_EQ(WaitForHost(), 0);

  const auto lines = StepLines(output());
  ASSERT_EQ(lines.size(), 12u);
  // (50 + step) of each of two ranks, over 20 targets; steps from 0.
  EXPECT_TRUE(lines[5].ends_with(" 5.5")) << lines[5];
  EXPECT_TRUE(lines[11].ends_with(" 6.1")) << lines[11];
  EXPECT_TRUE(lines[4].ends_with(" -")) << lines[4];
  for (const int64_t step : {4, 8, 12}) EXPECT_TRUE(HasCheckpoint(output(), step)) << step;
  const auto job = nlohmann::json::parse(ReadFile(output() + "/job.json").value());
  EXPECT_EQ(job["uid"], "0190-test-uid");
  EXPECT_EQ(job["spec"]["name"], "tiny");
  EXPECT_EQ(nlohmann::json::parse(ReadFile(output() + "/plan.json").value())["rankCount"], 2);
  EXPECT_TRUE(std::filesystem::exists(output() + "/export/config.json"));
  EXPECT_FALSE(std::filesystem::is_empty(output() + "/tensorboard"));
  EXPECT_TRUE(std::filesystem::exists(output() + "/logs/attempt-1/rank-1.log"));
  EXPECT_NE(ReadFile(output() + "/logs/attempt-1/jobhost.log")->find("SUCCEEDED"),
            std::string::npos);
  const auto trace = ReadFile(output() + "/trace/steps.json");
  ASSERT_TRUE(trace.ok());
  EXPECT_NE(trace->find("update head"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(socket_path()));
}

// Goal: nothing of the shared state is lost or taken twice over a checkpoint, streamed or resident.
// Method: losses depend on every weight; 12 steps at once against 8, a new host, 4 more.
TEST_F(JobEndTest, GoingOnFromACheckpointGivesTheSameLossesBitForBit) {
  ASSERT_EQ(RunToEnd().state(), v1::JOB_STATE_SUCCEEDED);
  const auto whole = StepLines(output());

  std::filesystem::remove_all(output());
  start_.mutable_spec()->set_steps(8);
  start_.mutable_spec()->mutable_checkpoint()->set_every_steps(3);
  ASSERT_EQ(RunToEnd().state(), v1::JOB_STATE_SUCCEEDED);
  start_.mutable_spec()->set_steps(12);
  start_.set_first_attempt(2);
  const auto end = RunToEnd();
  EXPECT_EQ(end.state(), v1::JOB_STATE_SUCCEEDED) << end.message();
  EXPECT_EQ(daemon_->transitions()[1].step(), 8);
  auto parts = StepLines(output());
  ASSERT_EQ(parts.size(), 12u);
  // Step 8 was the last of a shorter run, which evaluates there.
  parts[7] = parts[7].substr(0, parts[7].rfind(' ')) + " -";
  EXPECT_EQ(parts, whole);
}

// Goal: a checkpoint at every step, which must wait for the one before it, still gets every step
// and no other bit.
TEST_F(JobEndTest, CheckpointsAtEveryStepChangeNoLoss) {
  ASSERT_EQ(RunToEnd().state(), v1::JOB_STATE_SUCCEEDED);
  const auto whole = StepLines(output());
  std::filesystem::remove_all(output());
  start_.mutable_spec()->mutable_checkpoint()->set_every_steps(1);
  ASSERT_EQ(RunToEnd().state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(StepLines(output()), whole);
  for (const int64_t step : {10, 11, 12}) EXPECT_TRUE(HasCheckpoint(output(), step)) << step;
}

// Goal: `never` begins anew over an older run of the same job, and its own attempts still go on
// from its own checkpoints.
TEST_F(JobEndTest, ResumeNeverBeginsAnew) {
  ASSERT_EQ(RunToEnd().state(), v1::JOB_STATE_SUCCEEDED);
  const auto whole = StepLines(output());
  start_.set_uid("0190-second-uid");
  start_.mutable_spec()->set_resume("never");
  const auto end = RunToEnd({"OOM_FAKE_WORKER=0 1 150 kill"});
  EXPECT_EQ(end.state(), v1::JOB_STATE_SUCCEEDED) << end.message();
  EXPECT_EQ(daemon_->transitions()[1].step(), 0);
  EXPECT_EQ(end.attempt(), 2);
  EXPECT_EQ(StepLines(output()), whole);
}

TEST_F(JobEndTest, ResumeWithAnotherPrecisionIsRefusedByName) {
  ASSERT_EQ(RunToEnd().state(), v1::JOB_STATE_SUCCEEDED);
  const auto before = StepLines(output());
  start_.mutable_spec()->set_precision(v1::PRECISION_BFLOAT16);
  start_.mutable_plan()->set_precision(v1::PRECISION_BFLOAT16);
  DropPools();
  const auto end = RunToEnd();
  EXPECT_EQ(end.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(end.reason(), "INVALID_INPUT");
  EXPECT_NE(end.message().find("precision"), std::string::npos) << end.message();
  EXPECT_NE(end.message().find("float32"), std::string::npos) << end.message();
  EXPECT_EQ(StepLines(output()), before);
}

TEST_F(JobEndTest, DeferredUpdatesWithClippingRunToTheEnd) {
  start_.mutable_spec()->mutable_optimizer()->set_max_gradient_norm(0.5);
  start_.mutable_plan()->set_update_mode(v1::UPDATE_MODE_DEFERRED);
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->message();
  EXPECT_EQ(WaitForHost(), 0);
  EXPECT_EQ(StepLines(output()).size(), 12u);
}

// Goal: a daemon that dies costs nothing: no step, no transition, and what it had recorded is not
// told again.
TEST_F(JobEndTest, TransitionsThatADeadDaemonDidNotRecordAreRepeatedToTheNextOne) {
  start_.mutable_spec()->set_steps(40);
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  daemon_->acknowledge = false;
  ASSERT_TRUE(daemon_->WaitForState(v1::JOB_STATE_RUNNING));
  daemon_->Disconnect();

  FakeDaemon next(socket_path());
  ASSERT_TRUE(next.Connect());
  const auto end = next.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(next.States(), "STARTING RUNNING STOPPING SUCCEEDED");
  for (size_t i = 0; i < next.transitions().size(); ++i) {
    EXPECT_EQ(next.transitions()[i].number(), static_cast<int64_t>(i) + 1);
  }
  EXPECT_EQ(WaitForHost(), 0);
  EXPECT_EQ(StepLines(output()).size(), 40u);
}

TEST_F(JobEndTest, AJobThatEndsWithoutADaemonWaitsForOne) {
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  daemon_->acknowledge = false;
  ASSERT_TRUE(daemon_->WaitForEnd().has_value());
  daemon_->Disconnect();
  FakeDaemon next(socket_path());
  ASSERT_TRUE(next.Connect());
  ASSERT_TRUE(next.WaitForEnd().has_value());
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobEndTest, AnEphemeralJobTakesACheckpointAndEndsWhenItsDaemonIsGone) {
  start_.mutable_spec()->set_steps(1000000);
  start_.mutable_spec()->mutable_checkpoint()->set_every_steps(0);
  start_.set_ephemeral(true);
  StartHost({}, {"--daemon-absence-seconds", "0.2"});
  ASSERT_TRUE(daemon_->Connect());
  ASSERT_TRUE(daemon_->ReadUntil([&] { return daemon_->progress().step() > 3; }));
  daemon_->Disconnect();
  EXPECT_EQ(WaitForHost(), 0);
  const auto lines = StepLines(output());
  ASSERT_GT(lines.size(), 3u);
  EXPECT_TRUE(HasCheckpoint(output(), static_cast<int64_t>(lines.size())));
}

}  // namespace
}  // namespace oom
