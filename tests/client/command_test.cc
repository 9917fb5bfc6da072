// Every command but those that follow a job: output forms, exit codes, retries, names.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "client/command_table.h"
#include "client/job_yaml.h"
#include "client/version.h"
#include "runtime/base/file.h"
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

// Goal: the document, the parser and the table agree. Method: each command, option and alias of the table
// is looked for in docs/CLI.md, and each heading of the document in the table.
TEST(DocumentTest, EveryCommandAndOptionIsInTheDocumentAndNothingElseIs) {
  const Result<std::string> document = ReadFile(OOM_SOURCE_DIR "/docs/CLI.md");
  ASSERT_TRUE(document.ok()) << document.status().ToString();
  std::set<std::string> headings;
  std::map<std::string, std::string> sections;
  std::string heading;
  for (const std::string& line : Lines(*document)) {
    if (line.starts_with("### `oom ")) heading = line.substr(9, line.find_first_of(" `", 9) - 9);
    if (line.starts_with("## ")) heading = "";
    sections[heading] += line + "\n";
  }
  for (const OptionRow& row : GlobalOptions()) {
    const std::string longest(row.flags.substr(row.flags.rfind(',') + 1));
    EXPECT_NE(document->find("`" + longest), std::string::npos) << longest;
  }
  std::set<std::string> names;
  for (const CommandRow& command : Commands()) {
    const std::string name(command.name);
    names.insert(name);
    ASSERT_TRUE(sections.contains(name)) << name << " has no section in docs/CLI.md";
    std::string synopsis = "### `oom " + name;
    if (command.argument != ArgumentKind::kNone) {
      synopsis += " " + std::string(ArgumentSynopsis(command.argument));
    }
    EXPECT_NE(sections[name].find(synopsis + "`"), std::string::npos) << synopsis;
    for (const OptionRow& row : command.options) {
      std::istringstream flags{std::string(row.flags)};
      for (std::string flag; std::getline(flags, flag, ',');) {
        EXPECT_NE(sections[name].find("`" + flag), std::string::npos) << name << " " << flag;
      }
    }
  }
  for (const auto& [name, text] : sections) {
    EXPECT_TRUE(name.empty() || names.contains(name)) << "docs/CLI.md describes oom " << name;
  }
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
  for (const char* command : {"get", "describe", "watch", "logs", "wait", "cancel", "suspend", "resume",
                              "checkpoint", "export"}) {
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
    EXPECT_EQ(result.messages, std::string("oom: what went wrong [model.path] (") + error.reason + ")\n");
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

TEST_F(CommandTest, TheSocketIsFoundAsOomdPlacesIt) {
  options_.environment["OOM_HOST"] = "";
  options_.environment["XDG_RUNTIME_DIR"] = folder_;
  EXPECT_EQ(Run({"ls"}).exit_code, 0);
  options_.environment["XDG_RUNTIME_DIR"] = "";
  options_.environment["XDG_STATE_HOME"] = folder_ + "/state";
  EXPECT_NE(Run({"ls"}).messages.find(folder_ + "/state/oom/oomd.sock"), std::string::npos);
  options_.environment["XDG_STATE_HOME"] = "";
  options_.environment["HOME"] = folder_ + "/home";
  EXPECT_NE(Run({"ls"}).messages.find(folder_ + "/home/.local/state/oom/oomd.sock"), std::string::npos);
  EXPECT_EQ(Run({"ls", "--host", "unix:" + socket_}).exit_code, 0);
}

TEST_F(CommandTest, SubmitPrintsTheNameAndSendsARandomRequestId) {
  const OomResult first = Run({"submit", "job.yaml"});
  EXPECT_EQ(first.exit_code, 0) << first.messages;
  EXPECT_EQ(first.data, "tiny\n");
  EXPECT_EQ(Run({"submit", "job.yaml", "--name", "other"}).data, "other\n");
  EXPECT_EQ(Run({"submit", "job.yaml", "--name", "third", "--request-id", "mine"}).exit_code, 0);
  const auto created = fake_->created();
  ASSERT_EQ(created.size(), 3u);
  EXPECT_EQ(created[0].request_id().size(), 36u);
  EXPECT_NE(created[0].request_id(), created[1].request_id());
  EXPECT_EQ(created[0].job_id(), "");
  EXPECT_EQ(created[1].job_id(), "other");
  EXPECT_EQ(created[1].job().spec().name(), "other");
  EXPECT_EQ(created[2].request_id(), "mine");
  EXPECT_EQ(created[0].job().spec().output(), folder_ + "/runs/tiny");
  const OomResult twice = Run({"submit", "job.yaml"});
  EXPECT_EQ(twice.exit_code, 7) << twice.messages;
}

TEST_F(CommandTest, AJobFileWithoutANameIsNamedAfterItsOutput) {
  WriteFile("x.yaml", "model: {path: m}\ndata: {train: d}\nsequence_length: 8\nglobal_batch: 2\n"
                      "steps: 3\noutput: runs/2. My Run!\n");
  EXPECT_EQ(Run({"submit", "x.yaml"}).data, "my-run\n");
}

TEST_F(CommandTest, AWrongJobFileIsExitCode6BeforeAnythingIsSent) {
  WriteFile("bad.yaml", "steps: 1\nstepz: 2\n");
  for (const char* command : {"submit", "plan", "train"}) {
    const OomResult result = Run({command, "bad.yaml"});
    EXPECT_EQ(result.exit_code, 6);
    EXPECT_NE(result.messages.find("bad.yaml:2: unknown key 'stepz'; did you mean 'steps'?"),
              std::string::npos)
        << result.messages;
    EXPECT_EQ(Run({command, "missing.yaml"}).exit_code, 6);
  }
  EXPECT_EQ(fake_->unary_calls(), 0);
  WriteFile("big.yaml", std::string(2 << 20, '#'));
  EXPECT_EQ(Run({"submit", "big.yaml"}).exit_code, 6);
  options_.input = "model: {path: m}\ndata: {train: d}\nsequence_length: 8\nglobal_batch: 2\n"
                   "steps: 3\noutput: runs/piped\n";
  EXPECT_EQ(Run({"submit", "-"}).data, "piped\n");
}

TEST_F(CommandTest, ASubmissionWithoutAnAnswerSaysHowToRepeatIt) {
  fake_->FailNext({grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "slow")});
  const OomResult result = Run({"submit", "job.yaml", "--request-id", "abc"});
  EXPECT_EQ(result.exit_code, 124);
  EXPECT_NE(result.messages.find("--request-id abc"), std::string::npos);
}

v1::Plan MakePlan() {
  v1::Plan plan;
  plan.set_version(1);
  plan.set_path(v1::EXECUTION_PATH_LOCAL);
  plan.set_rank_count(2);
  plan.set_precision(v1::PRECISION_FLOAT32);
  plan.set_update_mode(v1::UPDATE_MODE_DEFERRED);
  plan.add_units()->set_home(v1::STATE_HOME_STREAMED);
  plan.add_units()->set_home(v1::STATE_HOME_RESIDENT);
  v1::PlanEstimate* estimate = plan.mutable_estimate();
  const std::tuple<const char*, const char*, int64_t> kRows[] = {
      {"device 0", "windows", 1 << 20}, {"numa 0", "moments", 3 << 20}, {"device 0", "boundaries", 1 << 20}};
  for (const auto& [space, item, bytes] : kRows) {
    v1::MemoryEstimate* row = estimate->add_memory();
    row->set_space(space);
    row->set_item(item);
    row->set_bytes(bytes);
  }
  v1::ResourceEstimate* resource = estimate->add_resources();
  resource->set_resource("H2D device 0");
  resource->set_seconds(0.25);
  estimate->set_step_seconds_lower_bound(0.25);
  estimate->set_deferred_extra_bytes(5 << 20);
  estimate->set_checkpoint_disk_bytes(int64_t{7} << 30);
  return plan;
}

TEST_F(CommandTest, PlanShowsMemoryDiskLowerBoundAndTheCostOfClippingAndSubmitsNothing) {
  fake_->SetPlan(MakePlan());
  const OomResult table = Run({"plan", "job.yaml"});
  ASSERT_EQ(table.exit_code, 0) << table.messages;
  for (const char* text :
       {"local, 2 ranks, float32", "1 streamed, 1 resident", "windows", "total       2.00 MiB",
        "H2D device 0", "0.2500", "at least 0.2500 s", "7.00 GiB for checkpoints",
        "deferred: clipping or accumulation keeps the whole gradient, 5.00 MiB more host memory"}) {
    EXPECT_NE(table.data.find(text), std::string::npos) << text << "\n" << table.data;
  }
  const Json json = Json::parse(Run({"plan", "job.yaml", "-o", "json"}).data);
  EXPECT_EQ(json["rankCount"], 2);
  EXPECT_EQ(json["updateMode"], "UPDATE_MODE_DEFERRED");
  EXPECT_NE(Run({"plan", "job.yaml", "-o", "yaml"}).data.find("update_mode: deferred"), std::string::npos);
  for (const auto& request : fake_->created()) EXPECT_TRUE(request.validate_only());
  EXPECT_EQ(Run({"ls", "-o", "name"}).data, "");
}

TEST_F(CommandTest, DescribeSaysWhyAJobWaits) {
  v1::Job job = MakeJob("a", v1::JOB_STATE_QUEUED);
  job.set_reason("WAITING_RESOURCES");
  job.set_jobs_ahead(2);
  job.set_blocked_by("host memory of numa 0: needs 12.0 GiB, 3.1 GiB free");
  (*job.mutable_spec()->mutable_labels())["team"] = "blue";
  fake_->Publish(job);
  const OomResult result = Run({"describe", "a"});
  EXPECT_NE(result.data.find("Waits for:      2 jobs ahead; host memory of numa 0: needs 12.0 GiB, 3.1 "
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
  EXPECT_EQ(Json::parse(Run({"logs", "a", "--rank", "host", "-o", "jsonl"}).data)["offsetBytes"], "10");
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
  EXPECT_NE(Run({"doctor", "--host", folder_ + "/none.sock"}).data.find("fix: oomd"), std::string::npos);
}

TEST_F(CommandTest, InitWritesAFileOnceAndPlanAcceptsIt) {
  WriteFile("model/config.json", R"({"model_type": "mixtral"})");
  std::filesystem::remove(folder_ + "/job.yaml");
  const OomResult first = Run({"init", "model"});
  EXPECT_EQ(first.exit_code, 0) << first.messages;
  EXPECT_EQ(first.data, "job.yaml\n");
  EXPECT_EQ(Run({"plan", "job.yaml"}).exit_code, 0);
  EXPECT_EQ(Run({"init", "model"}).exit_code, 7);
  EXPECT_EQ(Run({"init", "model", "--force"}).exit_code, 0);
  EXPECT_TRUE(ParseJobYaml(Run({"init", "model", "--file", "-"}).data, "x", folder_).ok());
  EXPECT_EQ(Run({"init", "nothing"}).exit_code, 4);
}

TEST_F(CommandTest, ExportStartsTheProgramBesideOomOnTheJobsOutputDirectory) {
  const std::string bin = folder_ + "/bin";
  std::filesystem::create_directories(bin);
  std::filesystem::copy_file(OOM_PROGRAM, bin + "/oom");
  options_.program = bin + "/oom";
  std::filesystem::create_directories(folder_ + "/runs/tiny/checkpoints");
  fake_->Publish(MakeJob("tiny", v1::JOB_STATE_SUCCEEDED));
  EXPECT_EQ(Run({"export", "tiny"}).exit_code, 1);  // No such program yet.
  WriteFile("bin/oom-export", "#!/bin/sh\necho \"$@\"\nexit 9\n");
  std::filesystem::permissions(bin + "/oom-export", std::filesystem::perms::owner_all);
  const OomResult by_name = Run({"export", "jobs/tiny", "--step", "20", "--state", "--output", "out"});
  EXPECT_EQ(by_name.exit_code, 9);
  EXPECT_EQ(by_name.data, "--output-directory " + folder_ + "/runs/tiny --step 20 --state --destination out\n");
  fake_.reset();
  EXPECT_EQ(Run({"export", "runs/tiny"}).data, "--output-directory runs/tiny\n");
  options_.folder = folder_ + "/runs";
  EXPECT_EQ(Run({"export", "tiny"}).data, "--output-directory tiny\n");
  EXPECT_EQ(Run({"export", "./none"}).exit_code, 4);
}

// The words that bash offers for `words`, the last one unfinished.
std::string Completions(const std::string& words, const std::string& folder, const std::string& socket) {
  const std::string script =
      "PATH=" + std::filesystem::path(OOM_PROGRAM).parent_path().string() + ":$PATH; source <(oom completion bash); COMP_WORDS=(" +
      words + "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _oom; echo \"${COMPREPLY[*]}\"";
  OomOptions options;
  options.program = "/bin/bash";
  options.folder = folder;
  options.environment["OOM_HOST"] = socket;
  return RunOom({"-c", script}, options).data;
}

TEST_F(CommandTest, CompletionOffersCommandsOptionsFormsAndJobs) {
  fake_->Publish(MakeJob("alpha", v1::JOB_STATE_RUNNING));
  fake_->Publish(MakeJob("alto", v1::JOB_STATE_RUNNING));
  EXPECT_EQ(Completions("oom des", folder_, socket_), "describe\n");
  EXPECT_EQ(Completions("oom -o json su", folder_, socket_), "submit suspend\n");
  EXPECT_EQ(Completions("oom cancel --n", folder_, socket_), "--now\n");
  EXPECT_EQ(Completions("oom ls -o js", folder_, socket_), "json jsonl\n");
  EXPECT_EQ(Completions("oom get al", folder_, socket_), "alpha alto\n");
  EXPECT_EQ(Completions("oom completion z", folder_, socket_), "zsh\n");
  EXPECT_EQ(Completions("oom train jo", folder_, socket_), "job.yaml\n");
  EXPECT_EQ(Completions("oom get al", folder_, folder_ + "/none.sock"), "\n");
}

TEST_F(CommandTest, EveryShellsScriptNamesEveryCommand) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = Run({"completion", shell}).data;
    for (const CommandRow& command : Commands()) {
      EXPECT_NE(script.find(command.name), std::string::npos) << shell << " " << command.name;
      for (const OptionRow& row : command.options) {
        const size_t dashes = row.flags.rfind("--");
        const std::string name(row.flags.substr(dashes + 2));
        EXPECT_NE(script.find(name), std::string::npos) << shell << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace oom
