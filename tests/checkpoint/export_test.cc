#include "runtime/checkpoint/export.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/model/hf_config.h"
#include "runtime/model/safetensors_directory.h"
#include "runtime/model/tensor_type.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

using testing::TemporaryDirectory;

constexpr char kConfig[] = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
  "hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 101, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2,
  "moe_intermediate_size": 20, "intermediate_size": 40, "norm_topk_prob": true,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1000000.0, "max_position_embeddings": 128, "tie_word_embeddings": false,
  "hidden_act": "silu", "attention_bias": false, "mlp_only_layers": [1], "decoder_sparse_step": 1,
  "initializer_range": 0.02, "pad_token_id": 5})";

class ExportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = directory_.path() + "/config.json";
    run_ = directory_.path() + "/run";
    ASSERT_TRUE(WriteFileAtomically(config_, kConfig).ok());
    ASSERT_TRUE(MakeDirectories(run_).ok());
    const auto model = ReadHfConfig(config_);
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    model_ = *model;
    ASSERT_TRUE(
        WriteFileAtomically(run_ + "/job.json",
                            R"({"uid": "uid-1", "spec": {"name": "tiny", "model": {"config": ")" +
                                config_ + R"(", "initialize": "INITIALIZATION_RANDOM"}}})")
            .ok());
  }

  void Write(int64_t step, Precision precision = Precision::kBfloat16,
             const std::string& uid = "uid-1") {
    Manifest manifest = testing::ManifestOf(model_, step, uid);
    manifest.precision = precision;
    const auto report = testing::WriteCheckpoint(
        {.output_directory = run_, .manifest = manifest, .units = BuildUnits(model_, 2)});
    ASSERT_TRUE(report.ok()) << report.status().ToString();
  }

  // Holds the exported directory against the values of `step`; "" or the first difference.
  std::string Compare(const std::string& directory, int64_t step, StateArray array,
                      TensorType type) {
    const auto opened = SafetensorsDirectory::Open(directory);
    if (!opened.ok()) return opened.status().ToString();
    const auto units = BuildUnits(model_, 1);
    for (const FileTensor& tensor : PublishedTensors(model_, units)) {
      const auto place = (*opened)->Find(tensor.name);
      if (place.info == nullptr || place.info->type != type || place.info->shape != tensor.shape) {
        return tensor.name + " is missing or of another type or shape";
      }
      std::vector<float> got(static_cast<size_t>(tensor.elements));
      const Status status = place.file->ReadFloats(*place.info, 0, got);
      if (!status.ok()) return status.ToString();
      const TensorSpec& spec =
          units[static_cast<size_t>(tensor.unit)].tensors[static_cast<size_t>(tensor.tensor)];
      for (int64_t i = 0; i < tensor.elements; ++i) {
        uint32_t bits = std::bit_cast<uint32_t>(testing::ValueAt(
            step, tensor.unit, array, spec.offset_elements + tensor.offset_elements + i));
        if (type == TensorType::kBF16) bits = uint32_t{FloatBitsToBfloat16(bits)} << 16;
        if (std::bit_cast<uint32_t>(got[static_cast<size_t>(i)]) != bits) {
          return tensor.name + "[" + std::to_string(i) + "]";
        }
      }
    }
    return "";
  }

  struct Outcome {
    int exit_code;
    std::string text;  // Both streams.
  };
  Outcome Run(const std::string& arguments) {
    const std::string command = std::string(OOM_EXPORT_PROGRAM) + " " + arguments + " 2>&1";
    FILE* pipe = ::popen(command.c_str(), "r");
    EXPECT_NE(pipe, nullptr);
    std::string text;
    std::array<char, 256> buffer;
    while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) text += buffer.data();
    return {WEXITSTATUS(::pclose(pipe)), text};
  }

  TemporaryDirectory directory_;
  std::string config_, run_;
  ModelDescription model_;
};

TEST_F(ExportTest, ExportsTheNewestAndEveryNamedStep) {
  Write(10);
  Write(20);
  const auto newest = ExportCheckpoint({.output_directory = run_});
  ASSERT_TRUE(newest.ok()) << newest.status().ToString();
  EXPECT_EQ(newest->step, 20);
  EXPECT_EQ(newest->destination, run_ + "/export");
  EXPECT_EQ(Compare(run_ + "/export", 20, StateArray::kMaster, TensorType::kBF16), "");
  EXPECT_TRUE(ReadHfConfig(run_ + "/export").ok());
  const auto older = ExportCheckpoint(
      {.output_directory = run_, .step = 10, .destination = directory_.path() + "/ten"});
  ASSERT_TRUE(older.ok()) << older.status().ToString();
  EXPECT_EQ(Compare(directory_.path() + "/ten", 10, StateArray::kMaster, TensorType::kBF16), "");
}

TEST_F(ExportTest, Float32TrainingIsExportedWithoutRounding) {
  Write(10, Precision::kFloat32);
  ASSERT_TRUE(ExportCheckpoint({.output_directory = run_}).ok());
  EXPECT_EQ(Compare(run_ + "/export", 10, StateArray::kMaster, TensorType::kF32), "");
}

TEST_F(ExportTest, StateIsThreeFoldersOfFloat32) {
  Write(10);
  const auto report = ExportCheckpoint({.output_directory = run_, .state = true});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(testing::Names(report->destination),
            (std::vector<std::string>{"master", "moment1", "moment2"}));
  EXPECT_EQ(Compare(report->destination + "/master", 10, StateArray::kMaster, TensorType::kF32),
            "");
  EXPECT_EQ(Compare(report->destination + "/moment1", 10, StateArray::kMoment1, TensorType::kF32),
            "");
  EXPECT_EQ(Compare(report->destination + "/moment2", 10, StateArray::kMoment2, TensorType::kF32),
            "");
}

// A model directory in, a model directory out: its types, and every file beside the weights.
TEST_F(ExportTest, AModelDirectoryIsTheTemplate) {
  Write(10);
  const std::string source = directory_.path() + "/source";
  ASSERT_TRUE(ExportCheckpoint({.output_directory = run_, .destination = source}).ok());
  ASSERT_TRUE(WriteFileAtomically(source + "/tokenizer.json", "{\"a\": 1}").ok());
  ASSERT_TRUE(
      WriteFileAtomically(run_ + "/job.json",
                          R"({"uid": "uid-1", "spec": {"model": {"path": ")" + source + "\"}}}")
          .ok());
  Write(11);
  ASSERT_TRUE(ExportCheckpoint({.output_directory = run_}).ok());
  EXPECT_EQ(Compare(run_ + "/export", 11, StateArray::kMaster, TensorType::kBF16), "");
  EXPECT_EQ(*ReadFile(run_ + "/export/tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(*ReadFile(run_ + "/export/config.json"), *ReadFile(source + "/config.json"));
}

// The configuration says what the model was trained with, from a bare one and from a directory.
TEST_F(ExportTest, TheConfigurationHasTheRotaryScalingOfTheCheckpoint) {
  model_.set_yarn(MakeYarn(4.0, 32));
  Write(10);
  const std::string source = directory_.path() + "/source";
  ASSERT_TRUE(ExportCheckpoint({.output_directory = run_, .destination = source}).ok());
  EXPECT_EQ(ReadHfConfig(source)->yarn(), model_.yarn());
  EXPECT_EQ(ReadHfConfig(source)->rotary()->theta, 1e6);
  EXPECT_NE(ReadFile(source + "/config.json")->find("\"pad_token_id\": 5"), std::string::npos);
  ASSERT_TRUE(
      WriteFileAtomically(run_ + "/job.json",
                          R"({"uid": "uid-1", "spec": {"model": {"path": ")" + source + "\"}}}")
          .ok());
  for (const auto& yarn : {std::optional(MakeYarn(2.0, 16)), std::optional<YarnScaling>()}) {
    model_.set_yarn(yarn);
    Write(yarn ? 11 : 12);
    ASSERT_TRUE(ExportCheckpoint({.output_directory = run_}).ok());
    EXPECT_EQ(ReadHfConfig(run_ + "/export")->yarn(), yarn);
    EXPECT_EQ(Compare(run_ + "/export", yarn ? 11 : 12, StateArray::kMaster, TensorType::kBF16),
              "");
  }
}

TEST_F(ExportTest, ADamagedNewestIsSkippedAndADamagedNamedOneRefused) {
  Write(10);
  Write(20);
  testing::FlipBit(run_ + "/checkpoints/step-00000020/unit-0001.safetensors", 5000);
  const auto newest = ExportCheckpoint({.output_directory = run_});
  ASSERT_TRUE(newest.ok());
  EXPECT_EQ(newest->step, 10);
  EXPECT_EQ(newest->skipped_count, 1);
  const auto named = ExportCheckpoint({.output_directory = run_, .step = 20});
  ASSERT_FALSE(named.ok());
  EXPECT_EQ(named.status().code(), Code::kDataLoss);
  EXPECT_NE(named.status().message().find("unit-0001"), std::string::npos);
  // What was exported before is still there.
  EXPECT_EQ(Compare(run_ + "/export", 10, StateArray::kMaster, TensorType::kBF16), "");
}

TEST_F(ExportTest, TheJobsOwnCheckpointsComeFirst) {
  Write(10);
  Write(30, Precision::kBfloat16, "other");
  const auto own = ExportCheckpoint({.output_directory = run_});
  ASSERT_TRUE(own.ok());
  EXPECT_EQ(own->step, 10);
}

TEST_F(ExportTest, TheProgramsExitCodesAndMessages) {
  Outcome outcome = Run("--output-directory " + run_);
  EXPECT_EQ(outcome.exit_code, 4) << outcome.text;
  Write(10);
  Write(20);
  outcome = Run("--output-directory " + run_ + " --step 15");
  EXPECT_EQ(outcome.exit_code, 4) << outcome.text;
  EXPECT_NE(outcome.text.find("no checkpoint of step 15"), std::string::npos) << outcome.text;
  EXPECT_NE(outcome.text.find("10, 20"), std::string::npos) << outcome.text;
  EXPECT_EQ(std::count(outcome.text.begin(), outcome.text.end(), '\n'), 1);
  outcome = Run("--output-directory " + run_ + " --destination " + directory_.path() + "/out");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_EQ(outcome.text, "step 20: " + directory_.path() + "/out\n");
  EXPECT_EQ(Compare(directory_.path() + "/out", 20, StateArray::kMaster, TensorType::kBF16), "");
  EXPECT_EQ(Run("--output-directory " + directory_.path() + "/nowhere").exit_code, 4);
  EXPECT_EQ(Run("--no-such-option").exit_code, 2);
  EXPECT_EQ(Run("").exit_code, 2);
  EXPECT_EQ(Run("--output-directory " + run_ + " --step x").exit_code, 2);
  EXPECT_EQ(Run("--help").exit_code, 0);
  // Somebody's folder is not replaced.
  ASSERT_TRUE(MakeDirectories(directory_.path() + "/mine").ok());
  ASSERT_TRUE(WriteFileAtomically(directory_.path() + "/mine/thesis.tex", "x").ok());
  outcome = Run("--output-directory " + run_ + " --destination " + directory_.path() + "/mine");
  EXPECT_EQ(outcome.exit_code, 7) << outcome.text;
  EXPECT_TRUE(fs::exists(directory_.path() + "/mine/thesis.tex"));
  ASSERT_TRUE(WriteFileAtomically(run_ + "/job.json", "{\"uid\": \"a\", ").ok());
  EXPECT_EQ(Run("--output-directory " + run_).exit_code, 6);
  testing::FlipBit(run_ + "/checkpoints/step-00000020/manifest.json", 20);
  ASSERT_TRUE(
      WriteFileAtomically(run_ + "/job.json", R"({"spec": {"model": {"config": "x"}}})").ok());
  outcome = Run("--output-directory " + run_ + " --step 20");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
}

}  // namespace
}  // namespace oom
