#include "runtime/model/hf_export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/file.h"
#include "runtime/base/unique_fd.h"
#include "runtime/model/export_files.h"
#include "runtime/model/hf_config.h"
#include "runtime/model/hf_source.h"
#include "runtime/model/rope_config.h"
#include "runtime/model/staged_directory.h"
#include "runtime/model/strict_json.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

// Beside the tensors: headers, configuration, tokenizer.
constexpr int64_t kSpareBytes = int64_t{1} << 20;

std::string_view TorchTypeName(TensorType type) {
  switch (type) {
    case TensorType::kBF16:
      return "bfloat16";
    case TensorType::kF16:
      return "float16";
    default:
      return "float32";
  }
}

// The template's files with the types that the export gives them.
struct TemplatePlan {
  std::unique_ptr<SafetensorsDirectory> files;
  std::vector<FileTensor> published;  // As the files name them.
  std::vector<ExportFile> exports;
  bool retyped = false;  // Some tensor's type differs from the template's.
};

Result<TemplatePlan> PlanFromTemplate(const std::string& directory, const ModelDescription& model,
                                      const std::vector<ParameterUnit>& units,
                                      std::optional<TensorType> type) {
  TemplatePlan plan;
  OOM_ASSIGN_OR_RETURN(plan.files, SafetensorsDirectory::Open(directory));
  const NameLayout layout = LayoutOf(*plan.files, model);
  plan.published = PublishedTensors(model, units, layout);
  OOM_RETURN_IF_ERROR(CheckAgainstModel(*plan.files, model, layout, plan.published));
  std::unordered_map<std::string_view, const FileTensor*> by_name;
  for (const FileTensor& tensor : plan.published) by_name[tensor.name] = &tensor;
  if (model.tied_embedding) by_name[kHeadTensorName] = by_name.at(EmbeddingTensorName(layout));
  for (const auto& file : plan.files->files()) {
    ExportFile out;
    out.name = fs::path(file->path()).filename().string();
    bool file_retyped = false;
    for (const SafetensorInfo& info : file->header().tensors) {
      ExportTensor tensor;
      tensor.entry = {info.name, info.type, info.shape};
      const auto trained = by_name.find(info.name);
      if (trained == by_name.end()) {
        tensor.copied = {file.get(), &info};
      } else {
        tensor.source = trained->second;
        tensor.entry.type = type.value_or(info.type);
        file_retyped = file_retyped || tensor.entry.type != info.type;
      }
      out.tensors.push_back(std::move(tensor));
    }
    if (!file_retyped) out.like = file.get();
    plan.retyped = plan.retyped || file_retyped;
    plan.exports.push_back(std::move(out));
  }
  return plan;
}

// Weights in any form, and the index files that go with them. The model's own safetensors are
// written, not copied; any others would be left at their old values, so they stay behind too.
bool IsWeightsFile(const std::string& name) {
  static constexpr std::string_view kEndings[] = {
      ".safetensors", ".bin",  ".pt",   ".pth",  ".ckpt",       ".h5",
      ".msgpack",     ".gguf", ".onnx", ".ggml", ".index.json",
  };
  if (name.starts_with("consolidated.")) return true;
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [&name](std::string_view ending) { return name.ends_with(ending); });
}

Status CopyFile(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::copy_file(from, to, error);
  if (error) {
    return WriteErrnoStatus(error.value(), "cannot copy " + from.string() + " to " + to.string());
  }
  UniqueFd fd(::open(to.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid() || ::fsync(fd.get()) != 0) {
    return WriteErrnoStatus(errno, "cannot sync " + to.string());
  }
  return Status::Ok();
}

Status CopyOtherFiles(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::directory_iterator entry(from, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const fs::path target = to / name;
    std::error_code ignored;
    if (entry->is_directory(ignored)) {
      if (entry->is_symlink(ignored) || name.starts_with(".")) continue;
      OOM_RETURN_IF_ERROR(MakeDirectories(target.string()));
      OOM_RETURN_IF_ERROR(CopyOtherFiles(entry->path(), target));
    } else if (entry->is_regular_file(ignored) && !IsWeightsFile(name) &&
               !fs::exists(target, ignored)) {
      OOM_RETURN_IF_ERROR(CopyFile(entry->path(), target));
    }
  }
  if (error) return ErrnoStatus(error.value(), "cannot read " + from.string());
  return Status::Ok();
}

// A bare configuration may lie in any folder, so only what transformers loads beside a model is taken.
bool IsCompanionFile(const std::string& name) {
  static constexpr std::string_view kNames[] = {
      "special_tokens_map.json", "added_tokens.json",   "vocab.json",         "vocab.txt",
      "merges.txt",              "chat_template.jinja", "chat_template.json", "generation_config.json",
  };
  return name.starts_with("tokenizer") ||
         std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

Status CopyCompanions(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::directory_iterator entry(from, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (!entry->is_regular_file(ignored) || !IsCompanionFile(name)) continue;
    OOM_RETURN_IF_ERROR(CopyFile(entry->path(), to / name));
  }
  if (error) return ErrnoStatus(error.value(), "cannot read " + from.string());
  return Status::Ok();
}

// The configuration completed, with the type, if one is given, and the rotary scaling that the
// model was trained with; the order of its keys is kept.
Result<std::string> EditedConfig(const std::string& text, const std::string& where,
                                 const ModelDescription& model, std::optional<TensorType> type) {
  OOM_ASSIGN_OR_RETURN(const ModelDescription described, ParseHfConfig(text, where));
  if (described.family != model.family) {
    return Status(Code::kInvalidArgument, where + ": describes another architecture");
  }
  nlohmann::ordered_json root =
      nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  OOM_CHECK(root.is_object());  // ParseHfConfig has seen it.
  // A family has more than one architecture; what is named stays.
  if (!root.contains("architectures") || root["architectures"].is_null()) {
    root["architectures"] = {std::string(ArchitectureName(model.family))};
  }
  if (!root.contains("model_type") || root["model_type"].is_null()) {
    root["model_type"] = ModelTypeName(model.family);
  }
  nlohmann::ordered_json* const text_model =
      root.contains("text_config") ? &root["text_config"] : &root;
  if (described.yarn() != model.yarn()) WriteRope(model, text_model);
  if (!type) return root.dump(2) + "\n";
  const bool old_key = root.contains("torch_dtype");
  if (old_key) root["torch_dtype"] = TorchTypeName(*type);
  if (!old_key || root.contains("dtype")) root["dtype"] = TorchTypeName(*type);
  return root.dump(2) + "\n";
}

// The export replaces its target, so the template must lie neither in it nor around it.
Status CheckApart(const std::string& output, const std::string& template_directory) {
  std::error_code error;
  const fs::path a = fs::weakly_canonical(fs::absolute(output), error) / "";
  const fs::path b = fs::weakly_canonical(fs::absolute(template_directory), error) / "";
  const std::string a_text = a.lexically_normal().string();
  const std::string b_text = b.lexically_normal().string();
  if (!a_text.starts_with(b_text) && !b_text.starts_with(a_text)) return Status::Ok();
  return Status(Code::kInvalidArgument, "the output directory " + output +
                                            " and the model's directory " + template_directory +
                                            " lie in each other")
      .WithField(output);
}

// What an existing directory lacks to be a Hugging Face model.
std::string LacksModel(const std::string& directory) {
  const fs::path root(directory);
  std::error_code ignored;
  if (!fs::exists(root / kConfigFileName, ignored)) return kConfigFileName;
  if (fs::exists(root / kSingleFileName, ignored) || fs::exists(root / kIndexFileName, ignored)) {
    return "";
  }
  return kSingleFileName;
}

std::string LacksState(const std::string& directory) {
  std::error_code ignored;
  for (const char* folder : {"master", "moment1", "moment2"}) {
    if (!fs::is_directory(fs::path(directory) / folder, ignored)) return folder;
  }
  return "";
}

int64_t TotalBytes(const std::vector<ExportFile>& files) {
  int64_t bytes = kSpareBytes;
  for (const ExportFile& file : files) bytes += file.bytes();
  return bytes;
}

Status ExportWithTemplate(const StateSource& state, const ModelDescription& model,
                          const std::vector<ParameterUnit>& units, const HfExportOptions& options,
                          StagedDirectory& staged) {
  const std::string& from = options.template_directory;
  OOM_ASSIGN_OR_RETURN(const TemplatePlan plan,
                       PlanFromTemplate(from, model, units, options.type));
  OOM_RETURN_IF_ERROR(CheckFreeSpace(staged.path(), TotalBytes(plan.exports)));
  OOM_RETURN_IF_ERROR(WriteExportFiles(state, StateArray::kMaster, plan.exports, staged.path(),
                                       options.thread_count));
  const std::string config = from + "/" + kConfigFileName;
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(config));
  OOM_ASSIGN_OR_RETURN(const ModelDescription described, ParseHfConfig(text, config));
  if (plan.retyped || described.yarn() != model.yarn()) {
    const std::optional<TensorType> type = plan.retyped ? options.type : std::nullopt;
    OOM_ASSIGN_OR_RETURN(const std::string edited, EditedConfig(text, config, model, type));
    OOM_RETURN_IF_ERROR(WriteFileAtomically(staged.path() + "/" + kConfigFileName, edited));
  }
  if (plan.retyped) {
    OOM_RETURN_IF_ERROR(WriteExportIndex(plan.exports, staged.path()));
  } else if (plan.files->sharded()) {
    OOM_RETURN_IF_ERROR(
        CopyFile(fs::path(from) / kIndexFileName, fs::path(staged.path()) / kIndexFileName));
  }
  return CopyOtherFiles(from, staged.path());
}

Status ExportWithoutTemplate(const StateSource& state, const ModelDescription& model,
                             const std::vector<ParameterUnit>& units,
                             const HfExportOptions& options, StagedDirectory& staged) {
  const std::vector<FileTensor> published = PublishedTensors(model, units);
  const TensorType type = options.type.value_or(TensorType::kBF16);
  OOM_ASSIGN_OR_RETURN(const std::string config,
                       EditedConfig(options.config_json, "model configuration", model, type));
  const std::vector<ExportFile> files = CutIntoShards(published, type, options.shard_bytes);
  OOM_RETURN_IF_ERROR(CheckFreeSpace(staged.path(), TotalBytes(files)));
  OOM_RETURN_IF_ERROR(
      WriteExportFiles(state, StateArray::kMaster, files, staged.path(), options.thread_count));
  OOM_RETURN_IF_ERROR(WriteExportIndex(files, staged.path()));
  if (!options.companion_directory.empty()) {
    OOM_RETURN_IF_ERROR(CopyCompanions(options.companion_directory, staged.path()));
  }
  return WriteFileAtomically(staged.path() + "/" + kConfigFileName, config);
}

}  // namespace

Status ExportHuggingFace(const StateSource& state, const ModelDescription& model,
                         const std::vector<ParameterUnit>& units, const HfExportOptions& options) {
  OOM_CHECK(options.template_directory.empty() != options.config_json.empty());
  OOM_CHECK(!options.type || IsTrainableType(*options.type));
  const bool from_template = !options.template_directory.empty();
  if (from_template) {
    OOM_RETURN_IF_ERROR(CheckApart(options.output_directory, options.template_directory));
  }
  OOM_ASSIGN_OR_RETURN(const auto staged,
                       StagedDirectory::Create(options.output_directory, LacksModel));
  OOM_RETURN_IF_ERROR(from_template
                          ? ExportWithTemplate(state, model, units, options, *staged)
                          : ExportWithoutTemplate(state, model, units, options, *staged));
  return staged->Commit();
}

Status ExportState(const StateSource& state, const ModelDescription& model,
                   const std::vector<ParameterUnit>& units, const StateExportOptions& options) {
  const std::pair<StateArray, std::string> folders[] = {{StateArray::kMaster, "master"},
                                                        {StateArray::kMoment1, "moment1"},
                                                        {StateArray::kMoment2, "moment2"}};
  const std::vector<FileTensor> published = PublishedTensors(model, units);
  OOM_ASSIGN_OR_RETURN(const auto staged,
                       StagedDirectory::Create(options.output_directory, LacksState));
  const std::vector<ExportFile> files =
      CutIntoShards(published, TensorType::kF32, options.shard_bytes);
  OOM_RETURN_IF_ERROR(CheckFreeSpace(staged->path(), 3 * TotalBytes(files)));
  for (const auto& [array, name] : folders) {
    const std::string folder = staged->path() + "/" + name;
    OOM_RETURN_IF_ERROR(MakeDirectories(folder));
    OOM_RETURN_IF_ERROR(WriteExportFiles(state, array, files, folder, options.thread_count));
    OOM_RETURN_IF_ERROR(WriteExportIndex(files, folder));
  }
  return staged->Commit();
}

}  // namespace oom
