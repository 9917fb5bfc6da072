// Jobs whose workers die, hang or refuse, and jobs that may not start.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "tests/jobhost/job_fixture.h"

namespace oom {
namespace {

using JobFailureTest = JobFixture;

std::string Behaviour(int rank, int attempt, int64_t point, const std::string& action) {
  return "OOM_FAKE_WORKER=" + std::to_string(rank) + " " + std::to_string(attempt) + " " +
         std::to_string(point) + " " + action;
}

// Goal: wherever a worker is killed, the job goes on from its checkpoint and no loss differs from a
// run that was never disturbed; no process is left. Method: kill -9 after that many published words
// of a rank (about 19 a step), for many places of 12 steps.
TEST_F(JobFailureTest, AWorkerKilledAnywhereCostsOneAttemptAndNoBit) {
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  ASSERT_TRUE(daemon_->WaitForEnd().has_value());
  ASSERT_EQ(WaitForHost(), 0);
  const auto undisturbed = StepLines(output());
  int restarted = 0;
  for (int64_t point = -1; point < 230; point += point < 24 ? 5 : 29) {
    SCOPED_TRACE(point);
    std::filesystem::remove_all(output());
    start_.set_next_transition(start_.next_transition() + 100);
    daemon_ = std::make_unique<FakeDaemon>(socket_path());
    const int rank = static_cast<int>(point & 1);
    StartHost({Behaviour(rank, 1, point, "kill")});
    ASSERT_TRUE(daemon_->Connect());
    const auto end = daemon_->WaitForEnd();
    ASSERT_TRUE(end.has_value());
    ASSERT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->message();
    ASSERT_EQ(WaitForHost(), 0);
    EXPECT_EQ(StepLines(output()), undisturbed);
    for (const auto& transition : daemon_->transitions()) {
      if (transition.state() != v1::JOB_STATE_RECOVERING) continue;
      ++restarted;
      EXPECT_EQ(transition.reason(), "WORKER_CRASHED");
      EXPECT_NE(transition.message().find("signal 9"), std::string::npos) << transition.message();
      EXPECT_NE(transition.message().find("rank " + std::to_string(rank)), std::string::npos);
      EXPECT_EQ(transition.failed_log_path(),
                output() + "/logs/attempt-1/rank-" + std::to_string(rank) + ".log");
    }
  }
  EXPECT_GE(restarted, 10);
}

TEST_F(JobFailureTest, AWorkerThatEndsByItselfIsNamedWithItsExitCodeAndLog) {
  start_.mutable_spec()->mutable_retry()->set_max_failures(0);
  StartHost({Behaviour(1, 1, 50, "exit")});
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(end->reason(), "WORKER_CRASHED");
  EXPECT_NE(end->message().find("rank 1 exited with code 9"), std::string::npos) << end->message();
  std::ifstream log(end->failed_log_path());
  const std::string text((std::istreambuf_iterator<char>(log)), {});
  EXPECT_NE(text.find("the last words"), std::string::npos);
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobFailureTest, AHungWorkerIsFoundWhetherItLoadsOrTrains) {
  for (const int64_t point : {-1, 40}) {
    SCOPED_TRACE(point);
    std::filesystem::remove_all(output());
    start_.set_next_transition(start_.next_transition() + 100);
    daemon_ = std::make_unique<FakeDaemon>(socket_path());
    StartHost({Behaviour(0, 1, point, "hang")}, {"--worker-silence-seconds", "0.7"});
    ASSERT_TRUE(daemon_->Connect());
    ASSERT_TRUE(daemon_->WaitForState(v1::JOB_STATE_RECOVERING));
    EXPECT_EQ(daemon_->transitions().back().reason(), "WORKER_HUNG");
    EXPECT_NE(daemon_->transitions().back().message().find("rank 0"), std::string::npos)
        << daemon_->transitions().back().message();
    const auto end = daemon_->WaitForEnd();
    ASSERT_TRUE(end.has_value());
    EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->message();
    EXPECT_EQ(WaitForHost(), 0);
  }
}

TEST_F(JobFailureTest, BadInputThatAWorkerFindsIsNotRetried) {
  StartHost({Behaviour(1, 1, -1, "fail")});
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(daemon_->States(), "STARTING FAILED");
  EXPECT_EQ(end->reason(), "INVALID_INPUT");
  EXPECT_NE(end->message().find("data.train"), std::string::npos);
  EXPECT_NE(end->message().find("token 12"), std::string::npos) << end->message();
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobFailureTest, ALossThatIsNotFiniteIsRetriedAndThenNamed) {
  start_.mutable_spec()->mutable_retry()->set_max_failures(0);
  StartHost({Behaviour(1, 1, 5, "nan")});
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason(), "NON_FINITE_LOSS") << end->message();
  EXPECT_EQ(end->durable_step(), 4);
  EXPECT_EQ(StepLines(output()).size(), 5u);
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobFailureTest, AWorkerOfAnotherGraphIsRefused) {
  start_.mutable_spec()->mutable_retry()->set_max_failures(0);
  StartHost({Behaviour(0, 1, 0, "graph")});
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason(), "INTERNAL");
  EXPECT_NE(end->message().find("another graph"), std::string::npos) << end->message();
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobFailureTest, AWorkerOfAnotherBuildIsRefused) {
  start_.mutable_spec()->mutable_retry()->set_max_failures(0);
  StartHost({Behaviour(0, 1, 0, "build")});
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason(), "INTERNAL");
  EXPECT_NE(end->message().find("another build"), std::string::npos) << end->message();
  EXPECT_EQ(WaitForHost(), 0);
}

TEST_F(JobFailureTest, FailuresWithoutACheckpointBetweenThemExhaustTheRetries) {
  start_.set_worker_path(folder_ + "/no-such-worker");
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(daemon_->States(), "STARTING RECOVERING STARTING FAILED");
  EXPECT_EQ(end->reason(), "RETRIES_EXHAUSTED");
  EXPECT_EQ(end->failure_count(), 2);
  EXPECT_NE(end->message().find("no-such-worker"), std::string::npos) << end->message();
  EXPECT_EQ(WaitForHost(), 0);
}

// Goal: workers and their memory go with the job host, and a new host goes on from the durable
// step.
TEST_F(JobFailureTest, AKilledJobHostLeavesNothingBehindAndTheNextOneGoesOn) {
  start_.mutable_spec()->set_steps(60);
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  ASSERT_TRUE(daemon_->ReadUntil([&] { return daemon_->progress().durable_step() >= 8; }));
  KillHost();
  EXPECT_TRUE(Leftovers().empty());
  start_.set_first_attempt(2);
  start_.set_failure_count(1);
  start_.set_last_failure_durable_step(0);
  start_.set_next_transition(daemon_->transitions().back().number() + 1);
  FakeDaemon next(socket_path());
  StartHost();
  ASSERT_TRUE(next.Connect());
  const auto end = next.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->message();
  EXPECT_EQ(end->attempt(), 2);
  EXPECT_EQ(WaitForHost(), 0);
  EXPECT_EQ(StepLines(output()).size(), 60u);
}

TEST_F(JobFailureTest, TheOutputOfAnotherJobIsRefusedByName) {
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  ASSERT_TRUE(daemon_->WaitForEnd().has_value());
  ASSERT_EQ(WaitForHost(), 0);
  const auto before = StepLines(output());
  start_.set_uid("0190-other-uid");
  start_.mutable_spec()->set_name("intruder");
  start_.set_next_transition(50);
  FakeDaemon next(socket_path());
  StartHost();
  ASSERT_TRUE(next.Connect());
  const auto end = next.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason(), "INVALID_INPUT");
  EXPECT_NE(end->message().find("'tiny'"), std::string::npos) << end->message();
  EXPECT_NE(end->message().find("'intruder'"), std::string::npos);
  EXPECT_EQ(WaitForHost(), 0);
  EXPECT_EQ(StepLines(output()), before);
}

TEST_F(JobFailureTest, AnOutputDirectoryThatCannotBeMadeIsRefused) {
  std::ofstream(folder_ + "/file") << "x";
  start_.mutable_spec()->set_output(folder_ + "/file/out");
  StartHost();
  ASSERT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason(), "INVALID_INPUT");
  EXPECT_NE(end->message().find("output"), std::string::npos) << end->message();
  EXPECT_EQ(WaitForHost(), 0);
}

}  // namespace
}  // namespace oom
