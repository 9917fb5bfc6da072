// Every command but those that follow a job: output forms, exit codes, retries, names.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/job_yaml.h"
#include "client/version.h"
#include "tests/client/command_fixture.h"

namespace oom {
namespace {

using Json = nlohmann::json;

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream input(text);
  for (std::string line; std::getline(input, line);) lines.push_back(line);
  return lines;
}

TEST_F(CommandTest, ListHasEveryFormAndReadsEveryPage) {
  for (const char* id : {"a", "b", "c", "d", "e"}) {
    fake_->Publish(MakeJob(id, v1::JOB_STATE_RUNNING, 12));
  }
  const OomResult table = Run({"ls"});
  EXPECT_EQ(table.exit_code, 0);
  ASSERT_EQ(Lines(table.data).size(), 6u) << table.data;
  EXPECT_TRUE(table.data.starts_with("NAME  STATE")) << table.data;
  EXPECT_NE(table.data.find("12/20"), std::string::npos);
  EXPECT_EQ(table.data.find('\x1b'), std::string::npos);
  EXPECT_NE(Run({"ls", "-o", "wide"}).data.find("0190-c"), std::string::npos);
  EXPECT_EQ(Run({"ls", "-o", "name"}).data, "a\nb\nc\nd\ne\n");
  const Json list = Json::parse(Run({"ls", "-o", "json"}).data);
  ASSERT_EQ(list["jobs"].size(), 5u);
  EXPECT_EQ(list["jobs"][2]["name"], "jobs/c");
  EXPECT_EQ(list["jobs"][2]["durableStep"], "10");
  const std::vector<std::string> jsonl = Lines(Run({"ls", "-o", "jsonl"}).data);
  ASSERT_EQ(jsonl.size(), 5u);
  EXPECT_EQ(Json::parse(jsonl[4])["state"], "JOB_STATE_RUNNING");
  const OomResult yaml = Run({"ls", "-o", "yaml"});
  EXPECT_EQ(std::count(yaml.data.begin(), yaml.data.end(), '#'), 5) << yaml.data;
}

TEST_F(CommandTest, ListByStateAndAnEmptyList) {
  const OomResult empty = Run({"ls"});
  EXPECT_EQ(empty.exit_code, 0);
  EXPECT_EQ(empty.data, "");
  EXPECT_EQ(empty.messages, "no jobs\n");
  EXPECT_EQ(Run({"ls", "-q"}).messages, "");
  EXPECT_EQ(Json::parse(Run({"ls", "-o", "json"}).data)["jobs"].size(), 0u);
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING));
  fake_->Publish(MakeJob("b", v1::JOB_STATE_FAILED));
  EXPECT_EQ(Run({"ls", "--state", "failed", "-o", "name"}).data, "b\n");
  const OomResult wrong = Run({"ls", "--state", "faild"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_NE(wrong.messages.find("did you mean 'failed'?"), std::string::npos);
}

TEST_F(CommandTest, GetInYamlIsAJobFileThatGivesTheSameSpec) {
  ASSERT_EQ(Run({"submit", "job.yaml"}).exit_code, 0);
  const OomResult yaml = Run({"get", "jobs/tiny", "-o", "yaml"});
  const Result<v1::JobSpec> again = ParseJobYaml(yaml.data, "yaml", "/elsewhere");
  ASSERT_TRUE(again.ok()) << again.status().ToString() << yaml.data;
  EXPECT_EQ(again->SerializeAsString(), fake_->created().front().job().spec().SerializeAsString());
  EXPECT_EQ(Json::parse(Run({"get", "tiny", "-o", "json"}).data)["name"], "jobs/tiny");
  EXPECT_EQ(Run({"get", "tiny", "-o", "name"}).data, "tiny\n");
}

TEST_F(CommandTest, AnUnknownJobIsNotFoundWithASuggestionInEveryCommand) {
  fake_->Publish(MakeJob("quick-start", v1::JOB_STATE_RUNNING));
  for (const char* command : {"get", "describe", "watch", "logs", "wait", "cancel", "suspend",
                              "resume", "checkpoint", "export"}) {
    const OomResult result = Run({command, "quick-strat"});
    EXPECT_EQ(result.exit_code, 4) << command << result.messages;
    EXPECT_NE(result.messages.find("did you mean 'quick-start'?"), std::string::npos)
        << command << ": " << result.messages;
    EXPECT_EQ(result.data, "") << command;
  }
  EXPECT_EQ(Run({"get", "No Such\x1b[31m"}).exit_code, 4);
  EXPECT_EQ(Run({"get", "No Such\x1b[31m"}).messages.find('\x1b'), std::string::npos);
}

TEST_F(CommandTest, OfSeveralJobsEachGetsItsTurnAndTheFirstFailureCounts) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING));
  fake_->Publish(MakeJob("b", v1::JOB_STATE_SUCCEEDED));
  fake_->Publish(MakeJob("c", v1::JOB_STATE_RUNNING));
  const OomResult result = Run({"cancel", "a", "b", "nothing-like-it", "jobs/c"});
  EXPECT_EQ(result.exit_code, 7) << result.messages;
  EXPECT_EQ(fake_->Find("jobs/a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(fake_->Find("jobs/c").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_NE(result.messages.find("jobs/b has ended"), std::string::npos) << result.messages;
}

struct ErrorCase {
  grpc::StatusCode code;
  const char* reason;
  int exit_code;
};

TEST_F(CommandTest, EachErrorOfTheServerHasItsExitCodeAndShowsMessageFieldAndReason) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING));
  const ErrorCase kCases[] = {
      {grpc::StatusCode::INVALID_ARGUMENT, "INVALID_INPUT", 6},
      {grpc::StatusCode::RESOURCE_EXHAUSTED, "OUT_OF_HOST_MEMORY", 6},
      {grpc::StatusCode::RESOURCE_EXHAUSTED, "QUOTA_JOBS", 8},
      {grpc::StatusCode::FAILED_PRECONDITION, "DRAINING", 7},
      {grpc::StatusCode::ABORTED, "ETAG", 7},
      {grpc::StatusCode::ALREADY_EXISTS, "JOB_EXISTS", 7},
      {grpc::StatusCode::PERMISSION_DENIED, "NOT_OWNER", 5},
      {grpc::StatusCode::UNAUTHENTICATED, "NOBODY", 5},
      {grpc::StatusCode::INTERNAL, "INTERNAL", 1},
      {grpc::StatusCode::UNKNOWN, "INTERNAL", 1},
      {grpc::StatusCode::DATA_LOSS, "CHECKPOINT_CORRUPT", 1},
      {grpc::StatusCode::DEADLINE_EXCEEDED, "SLOW", 124},
  };
  for (const ErrorCase& error : kCases) {
    fake_->FailNext({ErrorWithDetails(error.code, "what went wrong", error.reason, "model.path")});
    const OomResult result = Run({"get", "a"});
    EXPECT_EQ(result.exit_code, error.exit_code) << error.reason;
    EXPECT_EQ(result.messages,
              std::string("oom: what went wrong [model.path] (") + error.reason + ")\n");
    EXPECT_EQ(result.data, "");
  }
}

TEST_F(CommandTest, UnavailableIsTriedFourTimesAndNothingElseIs) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING));
  const grpc::Status unavailable(grpc::StatusCode::UNAVAILABLE, "starting");
  fake_->FailNext({unavailable, unavailable, unavailable});
  EXPECT_EQ(Run({"get", "a"}).exit_code, 0);
  EXPECT_EQ(fake_->unary_calls(), 4);
  fake_->FailNext({unavailable, unavailable, unavailable, unavailable});
  EXPECT_EQ(Run({"get", "a"}).exit_code, 3);
  EXPECT_EQ(fake_->unary_calls(), 8);
  fake_->FailNext({grpc::Status(grpc::StatusCode::INTERNAL, "broken")});
  EXPECT_EQ(Run({"get", "a"}).exit_code, 1);
  EXPECT_EQ(fake_->unary_calls(), 9);
}

TEST_F(CommandTest, ACancelWhoseAnswerWasLostIsNotSentASecondTime) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_STOPPING));
  fake_->FailNext({grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost")});
  EXPECT_EQ(Run({"cancel", "a"}).exit_code, 0);
  EXPECT_TRUE(fake_->cancels().empty());
}

TEST_F(CommandTest, WithoutADaemonTheExitCodeIs3AndTheMessageSaysWhere) {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"ls"}, {"submit", "job.yaml"}, {"health"}, {"train", "job.yaml"}}) {
    std::vector<std::string> arguments = {"--host", folder_ + "/none.sock"};
    arguments.insert(arguments.end(), words.begin(), words.end());
    const OomResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 3) << words.front();
    EXPECT_NE(result.messages.find("no oomd at " + folder_ + "/none.sock"), std::string::npos)
        << result.messages;
  }
  WriteFile("plain", "");
  EXPECT_NE(Run({"ls", "--host", folder_ + "/plain"}).messages.find("nobody listens there"),
            std::string::npos);
  EXPECT_EQ(Run({"ls", "--host", "localhost:1234"}).exit_code, 2);
  EXPECT_EQ(Run({"ls", "--host", "/" + std::string(200, 'x')}).exit_code, 2);
}

// Goal: a socket that belongs to somebody else is "denied", not "no daemon".
// Method: root drops to another user, anybody else takes their own permission away.
TEST_F(CommandTest, ASocketThatMayNotBeOpenedIsExitCode5AndNamesItsOwner) {
  std::filesystem::permissions(folder_, std::filesystem::perms(0755));
  std::vector<std::string> arguments = {"ls"};
  if (::geteuid() == 0) {
    std::filesystem::permissions(socket_, std::filesystem::perms(0600));
    std::filesystem::copy_file(OOM_PROGRAM, folder_ + "/oom");
    options_.program = "/usr/bin/setpriv";
    arguments = {"--reuid=65534", "--regid=65534", "--clear-groups", folder_ + "/oom", "ls"};
  } else {
    std::filesystem::permissions(socket_, std::filesystem::perms::none);
  }
  const OomResult result = Run(arguments);
  EXPECT_EQ(result.exit_code, 5) << result.messages;
  EXPECT_NE(result.messages.find("belongs to uid " + std::to_string(::geteuid())), std::string::npos)
      << result.messages;
}

TEST_F(CommandTest, TheSocketIsFoundAsOomdPlacesIt) {
  options_.environment["OOM_HOST"] = "";
  options_.environment["XDG_RUNTIME_DIR"] = folder_;
  EXPECT_EQ(Run({"ls"}).exit_code, 0);
  options_.environment["XDG_RUNTIME_DIR"] = "";
  options_.environment["XDG_STATE_HOME"] = folder_ + "/state";
  EXPECT_NE(Run({"ls"}).messages.find(folder_ + "/state/oom/oomd.sock"), std::string::npos);
  options_.environment["XDG_STATE_HOME"] = "";
  options_.environment["HOME"] = folder_ + "/home";
  EXPECT_NE(Run({"ls"}).messages.find(folder_ + "/home/.local/state/oom/oomd.sock"),
            std::string::npos);
  EXPECT_EQ(Run({"ls", "--host", "unix:" + socket_}).exit_code, 0);
}

TEST_F(CommandTest, DescribeSaysWhyAJobWaits) {
  v1::Job job = MakeJob("a", v1::JOB_STATE_QUEUED);
  job.set_reason("WAITING_RESOURCES");
  job.set_jobs_ahead(2);
  job.set_blocked_by("host memory of numa 0: needs 12.0 GiB, 3.1 GiB free");
  (*job.mutable_spec()->mutable_labels())["team"] = "blue";
  fake_->Publish(job);
  const OomResult result = Run({"describe", "a"});
  EXPECT_NE(
      result.data.find("Waits for:      2 jobs ahead; host memory of numa 0: needs 12.0 GiB, 3.1 "
                       "GiB free"),
      std::string::npos)
      << result.data;
  EXPECT_NE(result.data.find("team=blue"), std::string::npos);
  job.set_state(v1::JOB_STATE_SUSPENDED);
  fake_->Publish(job);
  EXPECT_NE(Run({"describe", "a"}).data.find("`oom resume a` queues it again"), std::string::npos);
  EXPECT_EQ(Json::parse(Run({"describe", "a", "-o", "json"}).data)["jobsAhead"], 2);
}

TEST_F(CommandTest, CancelSuspendResumeAndCheckpointDoWhatTheySay) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING, 12));
  const OomResult checkpoint = Run({"checkpoint", "a"});
  EXPECT_EQ(checkpoint.data, folder_ + "/runs/a/checkpoints/step-00000012\n");
  EXPECT_EQ(checkpoint.messages, "a: step 12 is durable\n");
  EXPECT_EQ(Json::parse(Run({"checkpoint", "a", "-o", "json"}).data)["durableStep"], "12");
  EXPECT_EQ(Run({"suspend", "a"}).messages, "a: SUSPENDED\n");
  EXPECT_EQ(Run({"resume", "a"}).messages, "a: QUEUED\n");
  EXPECT_EQ(Run({"cancel", "a", "--grace", "2m", "-o", "name"}).data, "a\n");
  fake_->Publish(MakeJob("b", v1::JOB_STATE_RUNNING));
  EXPECT_EQ(Run({"cancel", "--now", "b"}).exit_code, 0);
  const auto cancels = fake_->cancels();
  ASSERT_EQ(cancels.size(), 2u);
  EXPECT_EQ(cancels[0].mode(), v1::CANCEL_MODE_CHECKPOINT);
  EXPECT_EQ(cancels[0].grace_seconds(), 120.0);
  EXPECT_EQ(cancels[1].mode(), v1::CANCEL_MODE_NOW);
  EXPECT_EQ(Run({"cancel", "b"}).exit_code, 7);
}

v1::LogChunk MakeChunk(int rank, int64_t offset, const std::string& line) {
  v1::LogChunk chunk;
  chunk.set_rank(rank);
  chunk.set_attempt(1);
  chunk.set_offset_bytes(offset);
  chunk.set_line(line);
  return chunk;
}

TEST_F(CommandTest, LogsNameTheRankUnlessThereIsOneAndTailCounts) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_SUCCEEDED));
  fake_->AddLog(MakeChunk(-1, 10, "host line"));
  fake_->AddLog(MakeChunk(0, 10, "zero"));
  fake_->AddLog(MakeChunk(1, 10, "one \x1b[31m"));
  fake_->AddLog(MakeChunk(0, 20, "zero again"));
  EXPECT_EQ(Run({"logs", "a"}).data,
            "[host] host line\n[rank 0] zero\n[rank 1] one \x1b[31m\n[rank 0] zero again\n");
  EXPECT_EQ(Run({"logs", "a", "--rank", "0"}).data, "zero\nzero again\n");
  EXPECT_EQ(Run({"logs", "a", "--rank", "host"}).data, "host line\n");
  EXPECT_EQ(Run({"logs", "a", "--rank", "1", "--rank", "0", "--tail", "2"}).data,
            "[rank 1] one \x1b[31m\n[rank 0] zero again\n");
  EXPECT_EQ(Run({"logs", "a", "--rank", "one"}).exit_code, 2);
  EXPECT_EQ(Json::parse(Run({"logs", "a", "--rank", "host", "-o", "jsonl"}).data)["offsetBytes"],
            "10");
}

TEST_F(CommandTest, FollowedLogsGoOnAfterALostConnectionWithoutRepeatingALine) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING));
  for (int i = 1; i <= 5; ++i) fake_->AddLog(MakeChunk(0, 10 * i, "line " + std::to_string(i)));
  fake_->BreakLogs(3, grpc::Status(grpc::StatusCode::UNAVAILABLE, "restart"));
  OomProcess process({"logs", "-f", "a"}, options_);
  ASSERT_TRUE(process.WaitFor("line 5"));
  fake_->AddLog(MakeChunk(0, 60, "line 6"));
  fake_->Publish(MakeJob("a", v1::JOB_STATE_SUCCEEDED));
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 0) << result.messages;
  EXPECT_EQ(result.data,
            "[rank 0] line 1\n[rank 0] line 2\n[rank 0] line 3\n[rank 0] line 4\n[rank 0] line 5\n"
            "[rank 0] line 6\n");
}

TEST_F(CommandTest, NodeHealthAndVersion) {
  EXPECT_NE(Run({"node"}).data.find("fake-node, oomd 9.8.7"), std::string::npos);
  EXPECT_EQ(Json::parse(Run({"node", "-o", "json"}).data)["numaNodes"][0]["pageKind"], "4KiB");
  EXPECT_NE(Run({"node"}).data.find("4KiB"), std::string::npos);
  EXPECT_NE(Run({"node"}).messages.find("hugepages: sudo sysctl -w vm.nr_hugepages=2048"),
            std::string::npos);
  EXPECT_NE(Run({"node"}).messages.find("GPUs: GPU 1 does not answer"), std::string::npos);
  EXPECT_NE(Run({"node", "-o", "yaml"}).data.find("pool_capacity: 8GiB"), std::string::npos);
  EXPECT_EQ(Run({"health"}).data, "SERVING\n");
  EXPECT_EQ(Run({"health", "--ready"}).exit_code, 0);
  fake_->SetReady(false);
  EXPECT_EQ(Run({"health"}).exit_code, 0);
  const OomResult not_ready = Run({"health", "--ready"});
  EXPECT_EQ(not_ready.exit_code, 1);
  EXPECT_EQ(not_ready.data, "NOT_SERVING\n");
  EXPECT_EQ(Run({"version"}).data, std::string("oom ") + kVersion + "\noomd 9.8.7\n");
  const OomResult alone = Run({"version", "--host", folder_ + "/none.sock"});
  EXPECT_EQ(alone.exit_code, 0);
  EXPECT_NE(alone.data.find("oomd not reached"), std::string::npos);
}

TEST_F(CommandTest, DoctorPrintsAFixForEachFindingAndSeesTheDaemon) {
  const OomResult result = Run({"doctor", "-o", "json"});
  bool daemon = false;
  for (const Json& finding : Json::parse(result.data)) {
    EXPECT_EQ(finding["level"] == "ok", finding["fix"] == "") << finding;
    daemon = daemon || (finding["name"] == "daemon" && finding["level"] == "ok");
  }
  EXPECT_TRUE(daemon) << result.data;
  EXPECT_NE(Run({"doctor", "--host", folder_ + "/none.sock"}).data.find("fix: oomd"),
            std::string::npos);
}

}  // namespace
}  // namespace oom
