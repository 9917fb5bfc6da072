#include "tests/model/model_testing.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

namespace oom::testing {

namespace fs = std::filesystem;

TempDirectory::TempDirectory() {
  std::string pattern = (fs::temp_directory_path() / "oom_model_test_XXXXXX").string();
  OOM_CHECK(::mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void WriteText(const std::string& path, const std::string& content) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream file(path, std::ios::binary);
  file << content;
  OOM_CHECK(file.good());
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::map<std::string, std::string> ReadTree(const std::string& directory) {
  std::map<std::string, std::string> tree;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    tree[fs::relative(entry.path(), directory).string()] = ReadText(entry.path().string());
  }
  return tree;
}

bool SameBits(std::span<const float> a, std::span<const float> b) {
  const auto bytes_a = std::as_bytes(a);
  const auto bytes_b = std::as_bytes(b);
  return std::equal(bytes_a.begin(), bytes_a.end(), bytes_b.begin(), bytes_b.end());
}

std::string TinyQwenConfig() {
  return R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 24,
    "num_hidden_layers": 3, "vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "intermediate_size": 20, "norm_topk_prob": true, "mlp_only_layers": [1], "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06, "max_position_embeddings": 64, "torch_dtype": "bfloat16",
    "tie_word_embeddings": false})";
}

std::string TinyMixtralConfig() {
  return R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 24,
    "num_hidden_layers": 2, "vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "sliding_window": 16,
    "rms_norm_eps": 1e-05, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 64, "dtype": "bfloat16"})";
}

std::string TinyQwen35Config() {
  return R"({"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
    "hidden_size": 24, "num_hidden_layers": 4, "vocab_size": 97, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10, "hidden_act": "silu", "attention_bias": false,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0,
                        "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
                        "mrope_interleaved": true},
    "rms_norm_eps": 1e-06, "max_position_embeddings": 64, "dtype": "bfloat16",
    "tie_word_embeddings": false})";
}

std::string TinyGemmaConfig() {
  return R"({"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 24,
    "num_hidden_layers": 6, "vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": true,
    "num_kv_shared_layers": 0, "sliding_window": 16, "enable_moe_block": true, "num_experts": 5,
    "top_k_experts": 2, "moe_intermediate_size": 12, "intermediate_size": 20,
    "hidden_size_per_layer_input": 0, "use_double_wide_mlp": false, "attention_bias": false,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "pad_token_id": 0,
    "use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
                    "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
      "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                         "rope_theta": 1000000.0}},
    "rms_norm_eps": 1e-06, "max_position_embeddings": 64, "dtype": "bfloat16",
    "tie_word_embeddings": true})";
}

std::string Multimodal(const std::string& gemma_config) {
  nlohmann::ordered_json text = nlohmann::ordered_json::parse(gemma_config);
  text.erase("architectures");
  const nlohmann::ordered_json root = {{"architectures", {"Gemma4ForConditionalGeneration"}},
                                       {"model_type", "gemma4"},
                                       {"image_token_id", 90},
                                       {"tie_word_embeddings", true},
                                       {"dtype", "bfloat16"},
                                       {"text_config", text},
                                       {"vision_config", {{"hidden_size", 4}}}};
  return root.dump(2);
}

std::string WithKey(const std::string& config, const std::string& key, const std::string& value) {
  nlohmann::ordered_json root = nlohmann::ordered_json::parse(config);
  root.erase(key);
  if (!value.empty()) root[key] = nlohmann::ordered_json::parse(value);
  return root.dump(2);
}

::testing::AssertionResult IsError(const Status& status, Code code,
                                   const std::vector<std::string>& parts) {
  if (status.code() != code) {
    return ::testing::AssertionFailure() << "status is " << status.ToString();
  }
  for (const std::string& part : parts) {
    if (status.message().find(part) == std::string::npos) {
      return ::testing::AssertionFailure()
             << "\"" << status.message() << "\" does not name \"" << part << "\"";
    }
  }
  return ::testing::AssertionSuccess() << status.message();
}

RawTensor* FindTensor(std::vector<RawTensor>& tensors, const std::string& name) {
  for (RawTensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void WriteRawFile(const std::string& path, const std::string& header, const std::string& data) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i)
    file[static_cast<size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
  WriteText(path, file + header + data);
}

void WriteRawSafetensors(const std::string& path, const std::vector<RawTensor>& tensors) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  root["__metadata__"]["format"] = "pt";
  std::string data;
  for (const RawTensor& tensor : tensors) {
    root[tensor.name] = {{"dtype", TensorTypeName(tensor.type)},
                         {"shape", tensor.shape},
                         {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  // An odd padding: an export keeps it when it keeps the header.
  WriteRawFile(path, root.dump() + "   ", data);
}

std::vector<RawTensor> RandomTensors(const ModelDescription& model, TensorType type,
                                     uint64_t seed) {
  return RandomTensors(model, type, seed, DefaultLayout(model.family));
}

std::vector<RawTensor> RandomTensors(const ModelDescription& model, TensorType type, uint64_t seed,
                                     const NameLayout& layout) {
  std::mt19937_64 random(seed);
  std::vector<RawTensor> tensors;
  for (const FileTensor& tensor : PublishedTensors(model, BuildUnits(model, 1), layout)) {
    const size_t element_bytes = static_cast<size_t>(TensorTypeBytes(type));
    std::string bytes(static_cast<size_t>(tensor.elements) * element_bytes, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // -0.0 first in every tensor.
    for (size_t i = 0; i < element_bytes; ++i) bytes[i] = i + 1 == element_bytes ? '\x80' : '\0';
    tensors.push_back({tensor.name, type, tensor.shape, std::move(bytes)});
  }
  return tensors;
}

void WriteCheckpoint(const std::string& directory, const std::string& config,
                     const std::vector<RawTensor>& tensors, int shard_count) {
  WriteText(directory + "/config.json", config);
  WriteText(directory + "/tokenizer.json", "{\"model\": 1}");
  WriteText(directory + "/generation_config.json", "{}");
  WriteText(directory + "/README.md", "A model.\n");
  WriteText(directory + "/additional_chat_templates/tool.jinja", "{{ messages }}");
  if (shard_count == 1) {
    WriteRawSafetensors(directory + "/model.safetensors", tensors);
    return;
  }
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = 12345;
  std::vector<std::vector<RawTensor>> shards(static_cast<size_t>(shard_count));
  for (size_t i = 0; i < tensors.size(); ++i) {
    // Round robin, so that the parts of one canonical tensor lie in several files.
    const size_t shard = i % shards.size();
    shards[shard].push_back(tensors[i]);
    index["weight_map"][tensors[i].name] = "part-" + std::to_string(shard) + ".safetensors";
  }
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    WriteRawSafetensors(directory + "/part-" + std::to_string(shard) + ".safetensors",
                        shards[shard]);
  }
  WriteText(directory + "/model.safetensors.index.json", index.dump());
}

}  // namespace oom::testing
