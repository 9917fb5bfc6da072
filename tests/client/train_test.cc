// train, watch and wait: progress, outcomes, Ctrl-C, lost connections, the private daemon.

#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/client/command_fixture.h"

namespace oom {
namespace {

using Json = nlohmann::json;

class TrainTest : public CommandTest {
 protected:
  // Takes each submitted job to `state` in steps of one.
  void TrainTo(v1::JobState state, int64_t steps = 20) {
    fake_->OnCreate([this, state, steps](const v1::Job& created) {
      v1::Job job = created;
      job.set_state(v1::JOB_STATE_RUNNING);
      fake_->Publish(job);
      for (int64_t step = 1; step <= steps; ++step) {
        job.set_step(step);
        job.set_loss(4.0 - 0.1 * static_cast<double>(step));
        fake_->Publish(job, v1::JOB_EVENT_KIND_PROGRESS);
      }
      if (state == v1::JOB_STATE_RUNNING) return;
      job.set_state(state);
      if (state == v1::JOB_STATE_FAILED) {
        job.set_reason("NON_FINITE_LOSS");
        job.set_message("the loss of step 7 is not finite");
        job.set_failed_log_path(job.spec().output() + "/logs/attempt-1/rank-1.log");
      }
      fake_->Publish(job);
    });
  }
};

TEST_F(TrainTest, ASuccessfulRunShowsProgressAndWhereTheResultsAre) {
  TrainTo(v1::JOB_STATE_SUCCEEDED);
  const OomResult result = Run({"run", "job.yaml"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.data, "");
  EXPECT_EQ(result.messages.find('\r'), std::string::npos);
  const std::string out = folder_ + "/runs/tiny";
  for (const std::string& text :
       {std::string("submitted tiny\n"), std::string("step 20/20  loss 2.0000"),
        std::string("tiny SUCCEEDED after 20 steps, loss 2.0000"), out + "/export",
        out + "/steps.jsonl", out + "/tensorboard", out + "/trace"}) {
    EXPECT_NE(result.messages.find(text), std::string::npos) << text << "\n" << result.messages;
  }
}

TEST_F(TrainTest, TheFirstStepIsShownAtOnceNotAfterTheInterval) {
  TrainTo(v1::JOB_STATE_RUNNING, 1);
  OomProcess process({"train", "job.yaml", "--progress-interval", "1h"}, options_);
  EXPECT_TRUE(process.WaitFor("step 1/20  loss 3.9000"));
}

TEST_F(TrainTest, DataIsTheJobAndQuietMeansQuiet) {
  TrainTo(v1::JOB_STATE_SUCCEEDED);
  const OomResult result = Run({"train", "job.yaml", "-q", "-o", "json"});
  EXPECT_EQ(result.messages, "");
  EXPECT_EQ(Json::parse(result.data)["state"], "JOB_STATE_SUCCEEDED");
}

TEST_F(TrainTest, AFailedRunShowsTheLast20LinesOfTheFirstFailingRankAndItsPath) {
  TrainTo(v1::JOB_STATE_FAILED);
  std::string log;
  for (int i = 1; i <= 50; ++i) log += "log line " + std::to_string(i) + "\n";
  WriteFile("runs/tiny/logs/attempt-1/rank-1.log", log + "the \x1b[2Jend");
  const OomResult result = Run({"train", "job.yaml", "-q"});
  EXPECT_EQ(result.exit_code, 10);
  EXPECT_NE(
      result.messages.find("tiny FAILED: NON_FINITE_LOSS: the loss of step 7 is not finite\n  | "
                           "log line 32\n"),
      std::string::npos)
      << result.messages;
  EXPECT_NE(result.messages.find("  | log line 50\n  | the \\x1b[2Jend\nlog: " + folder_ +
                                 "/runs/tiny/logs/attempt-1/rank-1.log\n"),
            std::string::npos)
      << result.messages;
  EXPECT_EQ(result.messages.find("log line 31"), std::string::npos);
}

TEST_F(TrainTest, ALogThatCannotBeReadComesFromTheDaemon) {
  TrainTo(v1::JOB_STATE_FAILED);
  for (int rank = 0; rank < 2; ++rank) {
    v1::LogChunk chunk;
    chunk.set_rank(rank);
    chunk.set_offset_bytes(5);
    chunk.set_line("from the daemon, rank " + std::to_string(rank));
    fake_->AddLog(chunk);
  }
  const OomResult result = Run({"train", "job.yaml"});
  EXPECT_EQ(result.exit_code, 10);
  EXPECT_NE(result.messages.find("  | from the daemon, rank 1\n"), std::string::npos)
      << result.messages;
  EXPECT_EQ(result.messages.find("rank 0"), std::string::npos);
}

TEST_F(TrainTest, ACancelledRunIsExitCode11) {
  TrainTo(v1::JOB_STATE_CANCELLED, 3);
  const OomResult result = Run({"train", "job.yaml"});
  EXPECT_EQ(result.exit_code, 11);
  EXPECT_NE(result.messages.find("tiny CANCELLED at step 3"), std::string::npos) << result.messages;
}

TEST_F(TrainTest, CtrlCDetachesAndTheJobGoesOn) {
  TrainTo(v1::JOB_STATE_RUNNING, 2);
  OomProcess process({"train", "job.yaml"}, options_);
  ASSERT_TRUE(process.WaitFor("/20  loss"));
  process.Signal(SIGINT);
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 130) << result.messages;
  EXPECT_NE(result.messages.find("re-attach: oom watch tiny\n"), std::string::npos)
      << result.messages;
  EXPECT_TRUE(fake_->cancels().empty());
  EXPECT_EQ(fake_->Find("jobs/tiny").state(), v1::JOB_STATE_RUNNING);
}

TEST_F(TrainTest, ASecondCtrlCCancelsAfterACheckpoint) {
  TrainTo(v1::JOB_STATE_RUNNING, 2);
  OomProcess process({"train", "job.yaml"}, options_);
  ASSERT_TRUE(process.WaitFor("/20  loss"));
  process.Signal(SIGINT);
  ASSERT_TRUE(process.WaitFor("re-attach: "));
  process.Signal(SIGINT);
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 11) << result.messages;
  ASSERT_EQ(fake_->cancels().size(), 1u);
  EXPECT_EQ(fake_->cancels()[0].mode(), v1::CANCEL_MODE_CHECKPOINT);
}

TEST_F(TrainTest, CtrlCInWatchNeverCancels) {
  fake_->Publish(MakeJob("tiny", v1::JOB_STATE_RUNNING, 5));
  OomProcess process({"watch", "tiny", "--host", socket_}, options_);
  ASSERT_TRUE(process.WaitFor("step 5/20"));
  process.Signal(SIGINT);
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_NE(result.messages.find("re-attach: oom watch tiny --host " + socket_), std::string::npos);
  EXPECT_TRUE(fake_->cancels().empty());
}

// Transitions that `oom watch -o jsonl` printed, by number.
std::vector<int64_t> Sequences(const std::string& data) {
  std::vector<int64_t> numbers;
  std::istringstream lines(data);
  for (std::string line; std::getline(lines, line);) {
    const Json event = Json::parse(line);
    if (event["kind"] == "JOB_EVENT_KIND_TRANSITION") {
      numbers.push_back(std::stoll(event["sequence"].get<std::string>()));
    }
  }
  return numbers;
}

// Goal: whatever cuts the stream, every transition comes once and in order.
// Method: the server ends each of three streams after four events, for different reasons.
TEST_F(TrainTest, WatchLosesAndRepeatsNoEventWhenStreamsBreak) {
  fake_->Publish(MakeJob("tiny", v1::JOB_STATE_QUEUED));
  fake_->BreakWatches(
      4, {grpc::Status(grpc::StatusCode::UNAVAILABLE, "restart"),
          ErrorWithDetails(grpc::StatusCode::RESOURCE_EXHAUSTED, "too slow", "WATCH_OVERFLOW"),
          grpc::Status(grpc::StatusCode::UNAVAILABLE, "again")});
  OomProcess process({"watch", "tiny", "-o", "jsonl"}, options_);
  ASSERT_TRUE(process.WaitFor("BOOKMARK"));
  for (int i = 2; i <= 19; ++i) fake_->Publish(MakeJob("tiny", v1::JOB_STATE_RUNNING, i));
  fake_->Publish(MakeJob("tiny", v1::JOB_STATE_SUCCEEDED, 20));
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 0) << result.messages;
  std::vector<int64_t> expected;
  for (int64_t i = 2; i <= 20; ++i) expected.push_back(i);
  EXPECT_EQ(Sequences(result.data), expected);
  EXPECT_EQ(fake_->watches().size(), 4u);
}

TEST_F(TrainTest, ATokenThatIsTooOldLeadsToANewSnapshot) {
  fake_->Publish(MakeJob("tiny", v1::JOB_STATE_SUCCEEDED, 20));
  fake_->BreakWatches(
      0, {ErrorWithDetails(grpc::StatusCode::OUT_OF_RANGE, "compacted", "TOKEN_COMPACTED")});
  const OomResult result = Run({"watch", "tiny", "-o", "jsonl", "--resume-token", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.messages;
  EXPECT_NE(result.data.find("JOB_EVENT_KIND_SNAPSHOT"), std::string::npos) << result.data;
  const auto watches = fake_->watches();
  ASSERT_EQ(watches.size(), 2u);
  EXPECT_EQ(watches[0].resume_token(), "1");
  EXPECT_EQ(watches[1].resume_token(), "");
}

TEST_F(TrainTest, AnErrorThatIsNotALostConnectionEndsTheWatch) {
  fake_->Publish(MakeJob("tiny", v1::JOB_STATE_RUNNING, 1));
  fake_->BreakWatches(1, {grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "not yours")});
  EXPECT_EQ(Run({"watch", "tiny"}).exit_code, 5);
}

// Goal: a client outlives a restart of oomd. Method: one fake ends, another takes over what it
// stored.
TEST_F(TrainTest, TrainGoesOnAfterARestartOfTheDaemon) {
  TrainTo(v1::JOB_STATE_RUNNING, 2);
  OomProcess process({"train", "job.yaml"}, options_);
  ASSERT_TRUE(process.WaitFor("/20  loss"));
  FakeOomd::Stored stored = fake_->Store();
  fake_.reset();
  ASSERT_TRUE(process.WaitFor("lost oomd"));
  fake_ = std::make_unique<FakeOomd>(socket_, std::move(stored));
  v1::Job job = fake_->Find("jobs/tiny");
  job.set_step(20);
  job.set_state(v1::JOB_STATE_SUCCEEDED);
  fake_->Publish(job);
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 0) << result.messages;
  ASSERT_EQ(fake_->watches().size(), 1u);
  EXPECT_NE(fake_->watches()[0].resume_token(), "");
}

TEST_F(TrainTest, WaitEndsWithTheJobsResult) {
  fake_->Publish(MakeJob("good", v1::JOB_STATE_SUCCEEDED));
  fake_->Publish(MakeJob("bad", v1::JOB_STATE_FAILED));
  fake_->Publish(MakeJob("gone", v1::JOB_STATE_CANCELLED));
  EXPECT_EQ(Run({"wait", "good"}).exit_code, 0);
  EXPECT_EQ(Run({"wait", "bad"}).exit_code, 10);
  EXPECT_EQ(Run({"wait", "jobs/gone"}).exit_code, 11);
  fake_->Publish(MakeJob("slow", v1::JOB_STATE_RUNNING));
  OomProcess process({"wait", "slow", "-o", "name"}, options_);
  fake_->Publish(MakeJob("slow", v1::JOB_STATE_SUCCEEDED));
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.data, "slow\n");
}

TEST_F(TrainTest, ATimeoutIs124WithAndWithoutADaemon) {
  fake_->Publish(MakeJob("slow", v1::JOB_STATE_RUNNING, 1));
  EXPECT_EQ(Run({"wait", "slow", "--timeout", "200ms"}).exit_code, 124);
  EXPECT_EQ(Run({"watch", "slow", "--timeout", "200ms"}).exit_code, 124);
  EXPECT_EQ(Run({"watch", "--timeout", "200ms"}).exit_code, 124);
  EXPECT_EQ(Run({"wait", "slow", "--timeout", "300ms", "--host", folder_ + "/none.sock"}).exit_code,
            124);
}

TEST_F(TrainTest, WaitWaitsForADaemonThatIsNotThereYet) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_SUCCEEDED));
  FakeOomd::Stored stored = fake_->Store();
  fake_.reset();
  OomProcess process({"wait", "a", "--timeout", "20s"}, options_);
  fake_ = std::make_unique<FakeOomd>(socket_, std::move(stored));
  EXPECT_EQ(process.Finish().exit_code, 0);
}

TEST_F(TrainTest, WatchOfEverythingPrintsALineAnEventUntilCtrlC) {
  OomProcess process({"watch"}, options_);
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING, 3));
  ASSERT_TRUE(process.WaitFor("a  RUNNING"));
  fake_->Publish(MakeJob("b", v1::JOB_STATE_FAILED));
  ASSERT_TRUE(process.WaitFor("b  FAILED"));
  process.Signal(SIGINT);
  EXPECT_EQ(process.Finish().exit_code, 130);
}

class EmbeddedTest : public CommandTest {
 protected:
  EmbeddedTest() {
    fake_.reset();
    const std::string bin = folder_ + "/bin";
    std::filesystem::create_directories(bin);
    std::filesystem::copy_file(OOM_PROGRAM, bin + "/oom");
    std::filesystem::copy_file(OOM_FAKE_OOMD, bin + "/oomd");
    options_.program = bin + "/oom";
    options_.environment["TMPDIR"] = folder_;
  }
};

TEST_F(EmbeddedTest, ThePrivateDaemonEndsWithTheJobAndLeavesNothing) {
  const OomResult result = Run({"train", "--embedded", "job.yaml"});
  EXPECT_EQ(result.exit_code, 0) << result.messages;
  EXPECT_NE(result.messages.find("tiny SUCCEEDED"), std::string::npos);
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("oom-")) << entry.path();
  }
  const OomResult kept = Run({"train", "--embedded", "--state-dir", "state", "job.yaml"});
  EXPECT_EQ(kept.exit_code, 0) << kept.messages;
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/state/stopped"));
  EXPECT_EQ(Run({"train", "--state-dir", "state", "job.yaml"}).exit_code, 2);
}

TEST_F(EmbeddedTest, CtrlCCancelsBecauseTheDaemonCannotBeLeft) {
  OomProcess process({"train", "--embedded", "--state-dir", "state", "--name", "long", "job.yaml"},
                     options_);
  ASSERT_TRUE(process.WaitFor("step 20/20"));
  process.Signal(SIGINT);
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 11) << result.messages;
  EXPECT_NE(result.messages.find("stopping after a checkpoint"), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/state/stopped"));
}

TEST_F(EmbeddedTest, ADaemonThatDoesNotStartIsExitCode3WithItsLog) {
  std::filesystem::remove(folder_ + "/bin/oomd");
  EXPECT_EQ(Run({"train", "--embedded", "job.yaml"}).exit_code, 4);
  WriteFile("bin/oomd", "#!/bin/sh\necho cannot open the store >&2\nexit 1\n");
  std::filesystem::permissions(folder_ + "/bin/oomd", std::filesystem::perms::owner_all);
  const OomResult result = Run({"train", "--embedded", "job.yaml"});
  EXPECT_EQ(result.exit_code, 3) << result.messages;
  EXPECT_NE(result.messages.find("cannot open the store"), std::string::npos) << result.messages;
}

}  // namespace
}  // namespace oom
