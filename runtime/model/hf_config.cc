#include "runtime/model/hf_config.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/base/file.h"
#include "runtime/model/config_reader.h"
#include "runtime/model/rope_config.h"
#include "runtime/model/strict_json.h"

namespace oom {
namespace {

using nlohmann::json;

struct FamilyRow {
  Family family;
  std::string_view model_type;
  std::string_view architecture;
};

constexpr FamilyRow kFamilies[] = {
    {Family::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"},
    {Family::kMixtral, "mixtral", "MixtralForCausalLM"},
};

// Bounds that keep every size of a hostile configuration far from overflow.
constexpr int64_t kLayerLimit = 4096;
constexpr int64_t kExpertTensorLimit = int64_t{1} << 22;

std::string SupportedNames() {
  std::string text;
  for (const FamilyRow& row : kFamilies) {
    if (!text.empty()) text += ", ";
    text += std::string(row.architecture) + " (" + std::string(row.model_type) + ")";
  }
  return text;
}

Result<Family> ReadFamily(const ConfigReader& reader) {
  std::string architecture;
  if (const json* list = reader.Find("architectures"); list != nullptr) {
    if (!list->is_array() || list->size() != 1 || !(*list)[0].is_string()) {
      return Status(Code::kInvalidArgument,
                    reader.where() + ": \"architectures\" is not a list of one name")
          .WithField(reader.where());
    }
    architecture = (*list)[0].get<std::string>();
  }
  std::string model_type;
  if (const json* value = reader.Find("model_type"); value != nullptr && value->is_string()) {
    model_type = value->get<std::string>();
  }
  for (const FamilyRow& row : kFamilies) {
    const bool architecture_fits = architecture.empty() || architecture == row.architecture;
    const bool type_fits = model_type.empty() || model_type == row.model_type;
    if (architecture_fits && type_fits && !(architecture.empty() && model_type.empty())) {
      return row.family;
    }
  }
  if (architecture.empty() && model_type.empty()) {
    return Status(Code::kInvalidArgument,
                  reader.where() + ": names neither \"architectures\" nor \"model_type\"")
        .WithField(reader.where());
  }
  return Status(Code::kInvalidArgument, reader.where() + ": unknown architecture \"" +
                                            architecture + "\" (model_type \"" + model_type +
                                            "\"); supported are " + SupportedNames())
      .WithField(reader.where());
}

// Features of these architectures, and of configurations like theirs, that would change the
// numbers.
void RefuseOthers(ConfigReader& reader) {
  reader.RefuseUnless("hidden_act", {"silu", "swish"});
  reader.RefuseUnless("attention_bias", {false});
  reader.RefuseUnless("mlp_bias", {false});
  reader.RefuseUnless("attention_dropout", {0});
  reader.RefuseUnless("hidden_dropout", {0});
  reader.RefuseUnless("router_jitter_noise", {0});
  reader.RefuseUnless("partial_rotary_factor", {1});
  reader.RefuseUnless("quantization_config", {});
  reader.RefuseUnless("use_sliding_window", {false});
  if (const json* types = reader.Find("layer_types"); types != nullptr) {
    for (const json& type : *types) {
      if (type != "full_attention") {
        reader.Fail("layer_types",
                    "has " + ConfigReader::Excerpt(type) + ", which training does not implement");
      }
    }
  }
}

int64_t ReadExpertCount(ConfigReader& reader) {
  const json* a = reader.Find("num_experts");
  const json* b = reader.Find("num_local_experts");
  if (a != nullptr && b != nullptr && *a != *b) {
    reader.Fail("num_experts", "is " + ConfigReader::Excerpt(*a) +
                                   " and \"num_local_experts\" is " + ConfigReader::Excerpt(*b));
  }
  return reader.Count(a != nullptr || b == nullptr ? "num_experts" : "num_local_experts",
                      std::nullopt);
}

// Layer n is dense if it is in mlp_only_layers or (n + 1) % decoder_sparse_step != 0.
void ReadMixtures(ConfigReader& reader, ModelDescription& model) {
  std::vector<MixtureKind> mixtures(static_cast<size_t>(model.layer_count),
                                    MixtureKind::kRoutedExperts);
  if (model.family == Family::kQwen3Moe) {
    const int64_t sparse_step = reader.Count("decoder_sparse_step", 1);
    for (int64_t layer = 0; layer < model.layer_count; ++layer) {
      if ((layer + 1) % sparse_step != 0) {
        mixtures[static_cast<size_t>(layer)] = MixtureKind::kDense;
      }
    }
    if (const json* dense = reader.Find("mlp_only_layers"); dense != nullptr) {
      if (!dense->is_array()) reader.Fail("mlp_only_layers", "is not a list");
      for (const json& entry : *dense) {
        if (!entry.is_number_unsigned()) {
          reader.Fail("mlp_only_layers", "has " + ConfigReader::Excerpt(entry) + ", not a layer");
          continue;
        }
        // A number beyond the last layer names no layer, as in transformers.
        const uint64_t layer = entry.get<uint64_t>();
        if (layer < mixtures.size()) mixtures[layer] = MixtureKind::kDense;
      }
    }
  }
  const bool any_dense =
      std::find(mixtures.begin(), mixtures.end(), MixtureKind::kDense) != mixtures.end();
  if (any_dense) model.dense_width = reader.Count("intermediate_size", std::nullopt);
  model.mixtures = std::move(mixtures);
}

void CheckTogether(ConfigReader& reader, const ModelDescription& model) {
  if (model.query_head_count % model.kv_head_count != 0) {
    reader.Fail("num_key_value_heads", "does not divide \"num_attention_heads\"");
  }
  if (model.head_size % 2 != 0) {
    reader.Fail("head_dim", "is " + std::to_string(model.head_size) +
                                "; the rotary embedding needs an even one");
  }
  if (model.experts_per_token > model.expert_count) {
    reader.Fail("num_experts_per_tok", "is above the number of experts");
  }
  if (model.layer_count * model.expert_count > kExpertTensorLimit) {
    reader.Fail("num_experts",
                "times \"num_hidden_layers\" is above " + std::to_string(kExpertTensorLimit));
  }
  // 2^57 parameters: their bytes still fit a signed 64-bit number with room.
  const double widest = static_cast<double>(
      std::max({model.vocabulary_size, 4 * model.query_head_count * model.head_size,
                3 * model.dense_width}));
  const double experts =
      3.0 * static_cast<double>(model.expert_count) * static_cast<double>(model.expert_width);
  const double parameters = static_cast<double>(model.hidden_size) * (widest + experts) *
                            static_cast<double>(model.layer_count + 2);
  if (parameters > 0x1p57) reader.Fail("hidden_size", "and the other sizes make a model too large");
}

}  // namespace

std::string_view ArchitectureName(Family family) {
  for (const FamilyRow& row : kFamilies) {
    if (row.family == family) return row.architecture;
  }
  OOM_CHECK_MSG(false, "unknown family");
}

std::string_view ModelTypeName(Family family) {
  for (const FamilyRow& row : kFamilies) {
    if (row.family == family) return row.model_type;
  }
  OOM_CHECK_MSG(false, "unknown family");
}

Result<ModelDescription> ParseHfConfig(std::string_view json_text, const std::string& where) {
  OOM_ASSIGN_OR_RETURN(const json root, ParseStrictJson(json_text, where));
  if (!root.is_object()) {
    return Status(Code::kInvalidArgument, where + ": is not a JSON object").WithField(where);
  }
  ConfigReader reader(root, where);
  ModelDescription model;
  OOM_ASSIGN_OR_RETURN(model.family, ReadFamily(reader));
  const bool qwen = model.family == Family::kQwen3Moe;
  model.hidden_size = reader.Count("hidden_size", std::nullopt);
  model.layer_count = reader.Count("num_hidden_layers", std::nullopt, kLayerLimit);
  model.vocabulary_size = reader.Count("vocab_size", std::nullopt);
  model.query_head_count = reader.Count("num_attention_heads", std::nullopt, 1 << 16);
  // An explicit null means one kv head a query head; without the key transformers versions differ.
  if (!root.contains("num_key_value_heads")) reader.Fail("num_key_value_heads", "is missing");
  model.kv_head_count = reader.Count("num_key_value_heads", model.query_head_count, 1 << 16);
  if (reader.Find("head_dim") == nullptr && reader.status().ok() &&
      model.hidden_size % model.query_head_count != 0) {
    reader.Fail("head_dim",
                "is missing, and \"num_attention_heads\" does not divide \"hidden_size\"");
  }
  model.head_size = reader.Count(
      "head_dim", std::max<int64_t>(model.hidden_size / model.query_head_count, 1), 1 << 16);
  model.expert_count = ReadExpertCount(reader);
  model.experts_per_token = reader.Count("num_experts_per_tok", std::nullopt);
  model.expert_width =
      reader.Count(qwen ? "moe_intermediate_size" : "intermediate_size", std::nullopt);
  model.query_key_norm = qwen;
  model.renormalize_top_k = qwen ? reader.Flag("norm_topk_prob", false) : true;
  model.rms_epsilon = reader.Positive("rms_norm_eps", qwen ? 1e-6 : 1e-5);
  model.tied_embedding = reader.Flag("tie_word_embeddings", false);
  model.initializer_range = reader.Positive("initializer_range", 0.02);
  model.max_positions = reader.Count("max_position_embeddings", qwen ? 32768 : 131072,
                                     std::numeric_limits<int32_t>::max());
  if (!qwen && reader.Find("sliding_window") != nullptr) {
    model.sliding_window =
        reader.Count("sliding_window", std::nullopt, std::numeric_limits<int32_t>::max());
  }
  ReadRope(reader, &model);
  RefuseOthers(reader);
  ReadMixtures(reader, model);
  CheckTogether(reader, model);
  if (!reader.status().ok()) return reader.status();
  return model;
}

Result<ModelDescription> ReadHfConfig(const std::string& path) {
  std::error_code ignored;
  std::filesystem::path file(path);
  if (std::filesystem::is_directory(file, ignored)) file /= kConfigFileName;
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(file.string(), int64_t{16} << 20));
  return ParseHfConfig(text, file.string());
}

}  // namespace oom
