// submit, plan, init and export.

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "client/job_yaml.h"
#include "runtime/base/file.h"
#include "runtime/base/units.h"
#include "tests/client/command_fixture.h"

namespace oom {
namespace {

using Json = nlohmann::json;

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
  WriteFile("x.yaml",
            "model: {path: m}\ndata: {train: d}\nsequence_length: 8\nglobal_batch: 2\n"
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
  options_.input =
      "model: {path: m}\ndata: {train: d}\nsequence_length: 8\nglobal_batch: 2\n"
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
  for (const bool kept : {true, true, true, false}) plan.add_layers()->set_retain_mixture(kept);
  plan.mutable_layers(0)->set_retain_mixer(true);
  v1::PlanEstimate* estimate = plan.mutable_estimate();
  const std::tuple<const char*, const char*, int64_t> kRows[] = {
      {"device 0", "windows", 1 << 20},
      {"numa 0", "moments", 3 << 20},
      {"device 0", "boundaries", 1 << 20}};
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
        "the mixers of 3 and the mixtures of 1 of 4 layers",
        "H2D device 0", "0.2500", "at least 0.2500 s", "7.00 GiB for checkpoints",
        "deferred: clipping or accumulation keeps the whole gradient, 5.00 MiB more host memory"}) {
    EXPECT_NE(table.data.find(text), std::string::npos) << text << "\n" << table.data;
  }
  const Json json = Json::parse(Run({"plan", "job.yaml", "-o", "json"}).data);
  EXPECT_EQ(json["rankCount"], 2);
  EXPECT_EQ(json["updateMode"], "UPDATE_MODE_DEFERRED");
  EXPECT_NE(Run({"plan", "job.yaml", "-o", "yaml"}).data.find("update_mode: deferred"),
            std::string::npos);
  for (const auto& request : fake_->created()) EXPECT_TRUE(request.validate_only());
  EXPECT_EQ(Run({"ls", "-o", "name"}).data, "");
}

TEST_F(CommandTest, PlanOfAGeometrySendsItsConfigurationWithoutDataAndOutput) {
  v1::Plan plan = MakePlan();
  fake_->SetPlan(plan);
  options_.environment["TMPDIR"] = folder_ + "/temporary";
  std::filesystem::create_directory(folder_ + "/temporary");
  // A folder is no job file.
  std::filesystem::create_directory(folder_ + "/qwen3-30b-a3b");
  const OomResult whole = Run({"plan", "qwen3-30b-a3b"});
  ASSERT_EQ(whole.exit_code, 0) << whole.messages;
  EXPECT_NE(whole.data.find("local, 2 ranks"), std::string::npos) << whole.data;
  const OomResult part = Run({"plan",
                              "mixtral-8x7b",
                              "--layers",
                              "3",
                              "--sequence-length",
                              "512",
                              "--global-batch",
                              "8",
                              "--devices",
                              "cuda",
                              "--device-count",
                              "4",
                              "--gpu-memory",
                              "1.5GiB",
                              "--host-memory",
                              "512GiB",
                              "--precision",
                              "float32",
                              "-o",
                              "json"});
  ASSERT_EQ(part.exit_code, 0) << part.messages;
  EXPECT_EQ(Json::parse(part.data)["rankCount"], 2);
  const auto created = fake_->created();
  ASSERT_EQ(created.size(), 2u);
  for (const v1::CreateJobRequest& request : created) {
    EXPECT_TRUE(request.validate_only());
    EXPECT_EQ(request.job().spec().model().initialize(), v1::INITIALIZATION_RANDOM);
    EXPECT_FALSE(request.job().spec().has_data());
    EXPECT_EQ(request.job().spec().output(), "");
  }
  const v1::JobSpec& first = created[0].job().spec();
  EXPECT_EQ(Json::parse(*ReadFile(first.model().config())),
            Json::parse(*ReadFile(OOM_SOURCE_DIR "/geometries/qwen3-30b-a3b/config.json")));
  EXPECT_EQ(first.sequence_length(), 4096);
  EXPECT_EQ(first.global_batch(), 16);
  EXPECT_EQ(first.devices().kind(), v1::DEVICE_KIND_CPU);
  EXPECT_EQ(first.precision(), v1::PRECISION_BFLOAT16);
  EXPECT_EQ(first.budgets().host_memory_bytes_size(), 0);
  const v1::JobSpec& second = created[1].job().spec();
  EXPECT_TRUE(second.model().config().starts_with(folder_ + "/temporary/")) << second.DebugString();
  EXPECT_EQ(second.sequence_length(), 512);
  EXPECT_EQ(second.global_batch(), 8);
  EXPECT_EQ(second.devices().kind(), v1::DEVICE_KIND_CUDA);
  EXPECT_EQ(second.devices().count(), 4);
  EXPECT_EQ(second.budgets().gpu_memory_bytes(), 3_GiB / 2);
  ASSERT_EQ(second.budgets().host_memory_bytes_size(), 1);
  EXPECT_EQ(second.budgets().host_memory_bytes(0), 512_GiB);
  EXPECT_EQ(second.precision(), v1::PRECISION_FLOAT32);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ + "/temporary"));
}

TEST_F(CommandTest, AnUnknownGeometryIsAnsweredWithThoseThatThereAre) {
  for (const char* command : {"plan", "init"}) {
    const OomResult result = Run({command, "qwen3-30b-a3"});
    EXPECT_EQ(result.exit_code, 4) << command;
    EXPECT_NE(result.messages.find("did you mean 'qwen3-30b-a3b'?"), std::string::npos)
        << result.messages;
    EXPECT_NE(result.messages.find("mixtral-8x7b, qwen3-30b-a3b"), std::string::npos)
        << result.messages;
  }
  const OomResult with_file = Run({"plan", "job.yaml", "--layers", "2"});
  EXPECT_EQ(with_file.exit_code, 2);
  EXPECT_NE(with_file.messages.find("--layers is for a geometry"), std::string::npos);
  for (const char* bytes : {"", "much", "-1GiB", "5 parsecs"}) {
    EXPECT_EQ(Run({"plan", "mixtral-8x7b", "--host-memory", bytes}).exit_code, 2) << bytes;
  }
  EXPECT_EQ(Run({"plan", "mixtral-8x7b", "--devices", "tpu"}).exit_code, 2);
  EXPECT_EQ(fake_->unary_calls(), 0);
}

TEST_F(CommandTest, InitOfAGeometryStartsFromItsConfiguration) {
  const OomResult result = Run({"init", "mixtral-8x7b", "--file", "-"});
  ASSERT_EQ(result.exit_code, 0) << result.messages;
  const Result<v1::JobSpec> spec = ParseJobYaml(result.data, "x", folder_);
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  EXPECT_EQ(spec->name(), "mixtral-8x7b");
  EXPECT_TRUE(spec->model().config().ends_with("/geometries/mixtral-8x7b/config.json"));
  EXPECT_EQ(spec->model().initialize(), v1::INITIALIZATION_RANDOM);
  EXPECT_TRUE(ReadFile(spec->model().config()).ok());
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
  const OomResult by_name =
      Run({"export", "jobs/tiny", "--step", "20", "--state", "--output", "out"});
  EXPECT_EQ(by_name.exit_code, 9);
  EXPECT_EQ(by_name.data,
            "--output-directory " + folder_ + "/runs/tiny --step 20 --state --destination out\n");
  fake_.reset();
  EXPECT_EQ(Run({"export", "runs/tiny"}).data, "--output-directory runs/tiny\n");
  options_.folder = folder_ + "/runs";
  EXPECT_EQ(Run({"export", "tiny"}).data, "--output-directory tiny\n");
  EXPECT_EQ(Run({"export", "./none"}).exit_code, 4);
}

}  // namespace
}  // namespace oom
