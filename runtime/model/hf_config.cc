#include "runtime/model/hf_config.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "runtime/base/file.h"
#include "runtime/model/config_reader.h"
#include "runtime/model/family_config.h"
#include "runtime/model/strict_json.h"

namespace oom {
namespace {

using nlohmann::json;

// The first row of a family is the one that an export without a template names.
struct FamilyRow {
  Family family;
  std::string_view model_type;
  std::string_view architecture;
  void (*read)(ConfigReader& reader, ModelDescription* model);
};

constexpr FamilyRow kFamilies[] = {
    {Family::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM", ReadQwen3},
    {Family::kMixtral, "mixtral", "MixtralForCausalLM", ReadMixtral},
    {Family::kQwen35Moe, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", ReadQwen35},
    {Family::kQwen35Moe, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", ReadQwen35},
    {Family::kGemma4, "gemma4_text", "Gemma4ForCausalLM", ReadGemma4},
    {Family::kGemma4, "gemma4", "Gemma4ForConditionalGeneration", ReadGemma4},
};

constexpr int64_t kExpertTensorLimit = int64_t{1} << 22;

std::string SupportedNames() {
  std::string text;
  for (const FamilyRow& row : kFamilies) {
    if (!text.empty()) text += ", ";
    text += std::string(row.architecture) + " (" + std::string(row.model_type) + ")";
  }
  return text;
}

Result<const FamilyRow*> ReadFamily(const ConfigReader& reader) {
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
      return &row;
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

// Sizes that only together are too large.
void CheckTogether(ConfigReader& reader, const ModelDescription& model) {
  if (model.layer_count() * model.expert_count > kExpertTensorLimit) {
    reader.Fail("num_experts",
                "times \"num_hidden_layers\" is above " + std::to_string(kExpertTensorLimit));
  }
  int64_t widest_mixer = 0;
  for (const LayerDescription& layer : model.layers) {
    const int64_t width =
        layer.mixer == MixerKind::kAttention
            ? 5 * layer.attention.query_width()
            : 3 * (layer.delta_net.channel_count() + layer.delta_net.value_width());
    widest_mixer = std::max(widest_mixer, width);
  }
  // 2^57 parameters: their bytes still fit a signed 64-bit number with room.
  const double widest = static_cast<double>(std::max(
      {model.vocabulary_size, widest_mixer, 3 * (model.dense_width + model.shared_width)}));
  const double experts =
      3.0 * static_cast<double>(model.expert_count) * static_cast<double>(model.expert_width);
  const double parameters = static_cast<double>(model.hidden_size) * (widest + experts) *
                            static_cast<double>(model.layer_count() + 2);
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
  ConfigReader top(root, where);
  OOM_ASSIGN_OR_RETURN(const FamilyRow* const row, ReadFamily(top));
  ModelDescription model;
  model.family = row->family;
  // A multimodal configuration has the text model's keys in an object of their own.
  const json* const nested = top.Find("text_config");
  if (nested != nullptr && !nested->is_object()) {
    top.Fail("text_config", "is not an object");
    return top.status();
  }
  if (nested == nullptr) {
    row->read(top, &model);
    top.RefuseUnknown();
    CheckTogether(top, model);
    OOM_RETURN_IF_ERROR(top.status());
    return model;
  }
  ConfigReader text(*nested, where + ": text_config");
  row->read(text, &model);
  text.RefuseUnknown();
  CheckTogether(text, model);
  OOM_RETURN_IF_ERROR(text.status());
  // The other towers are carried along; what speaks of their tokens says nothing about text.
  top.RefuseUnless("tie_word_embeddings", {model.tied_embedding});
  top.RefuseUnless("quantization_config", {});
  OOM_RETURN_IF_ERROR(top.status());
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
