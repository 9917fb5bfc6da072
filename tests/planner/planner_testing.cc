#include "tests/planner/planner_testing.h"

#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "runtime/base/check.h"

namespace oom::testing {
namespace {

namespace fs = std::filesystem;

template <class T>
void WriteNpy(const std::string& path, const std::string& descr, const std::vector<T>& values) {
  std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" +
                       std::to_string(values.size()) + ",), }";
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::string text("\x93NUMPY\x01\x00", 8);
  text += static_cast<char>(header.size() & 0xFF);
  text += static_cast<char>(header.size() >> 8);
  text += header;
  text.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  WriteText(path, text);
}

}  // namespace

JobDirectory::JobDirectory() {
  std::string pattern = (fs::temp_directory_path() / "oom_planner_test_XXXXXX").string();
  OOM_CHECK(::mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
  WriteText(*this / "config.json", ConfigText(32, 4, 200, 6, 32));
  WriteDataset(*this / "data", 1000, 200);
  fs::create_directory(*this / "out");
}

JobDirectory::~JobDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

v1::JobSpec JobDirectory::Spec() const {
  v1::JobSpec spec;
  spec.mutable_model()->set_config(*this / "config.json");
  spec.mutable_model()->set_initialize(v1::INITIALIZATION_RANDOM);
  spec.mutable_data()->set_train(*this / "data");
  spec.set_sequence_length(16);
  spec.set_global_batch(4);
  spec.set_steps(10);
  spec.set_output(*this / "out");
  return spec;
}

void WriteText(const std::string& path, const std::string& content) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream file(path, std::ios::binary);
  file << content;
  OOM_CHECK(file.good());
}

void WriteDataset(const std::string& directory, int64_t token_count, int64_t vocabulary_size) {
  std::vector<uint32_t> tokens;
  for (int64_t i = 0; i < token_count; ++i) {
    tokens.push_back(static_cast<uint32_t>(i * 7 % vocabulary_size));
  }
  WriteNpy(directory + "/tokens.npy", "<u4", tokens);
  WriteNpy(directory + "/documents.npy", "<i8", std::vector<int64_t>{0, token_count});
  WriteText(directory + "/dataset.json",
            "{\"vocabulary_size\": " + std::to_string(vocabulary_size) +
                ", \"tokens\": " + std::to_string(token_count) + ", \"documents\": 1}");
}

std::string ConfigText(int hidden, int layers, int vocabulary, int experts, int expert_width) {
  const auto number = [](int value) { return std::to_string(value); };
  return R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "hidden_size": )" +
         number(hidden) + R"(, "num_hidden_layers": )" + number(layers) + R"(, "vocab_size": )" +
         number(vocabulary) +
         R"(, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": )" +
         number(experts) + R"(, "num_experts_per_tok": 2, "moe_intermediate_size": )" +
         number(expert_width) +
         R"(, "intermediate_size": 64, "norm_topk_prob": true, "mlp_only_layers": [],
            "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "max_position_embeddings": 64,
            "torch_dtype": "bfloat16", "tie_word_embeddings": false})";
}

NodeLimits LargeNode() {
  return {.pool_capacity_bytes = {int64_t{1} << 40, int64_t{1} << 40}, .cpu_count = 8};
}

int ResidentUnits(const v1::Plan& plan) {
  return static_cast<int>(std::count_if(
      plan.units().begin(), plan.units().end(),
      [](const v1::UnitPlan& unit) { return unit.home() == v1::STATE_HOME_RESIDENT; }));
}

::testing::AssertionResult Refused(const Result<PlannedJob>& result, Code code,
                                   const std::string& reason, const std::string& field) {
  if (result.ok()) return ::testing::AssertionFailure() << "it was planned";
  const Status& status = result.status();
  if (status.code() == code && status.reason() == reason && status.field() == field) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << status.ToString() << ", reason " << status.reason() << ", field " << status.field();
}

}  // namespace oom::testing
