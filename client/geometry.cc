#include "client/geometry.h"

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "client/embedded_daemon.h"
#include "client/temporary_folder.h"
#include "runtime/base/file.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

constexpr char kFolder[] = "geometries";
constexpr char kConfigName[] = "config.json";
constexpr char kLayersKey[] = "num_hidden_layers";
constexpr int64_t kConfigLimitBytes = int64_t{16} << 20;
constexpr int64_t kDefaultSequence = 4096;
constexpr int64_t kDefaultBatch = 16;

}  // namespace

Result<std::vector<std::string>> GeometryNames() {
  OOM_ASSIGN_OR_RETURN(const std::string folder, PathBeside(kFolder));
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    std::error_code ignored;
    if (!fs::is_regular_file(entry->path() / kConfigName, ignored)) continue;
    names.push_back(entry->path().filename().string());
  }
  if (error) return Status(Code::kNotFound, "there is no folder " + folder + " beside oom");
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::string> FindGeometry(const std::string& name) {
  OOM_ASSIGN_OR_RETURN(const std::string folder, PathBeside(kFolder));
  OOM_ASSIGN_OR_RETURN(const std::vector<std::string> names, GeometryNames());
  if (std::find(names.begin(), names.end(), name) != names.end()) {
    return folder + "/" + name + "/" + kConfigName;
  }
  const std::string closest = ClosestName(name, names);
  std::string list;
  for (const std::string& known : names) list += (list.empty() ? "" : ", ") + known;
  return Status(Code::kNotFound, "there is neither a file nor a geometry '" + name + "'" +
                                     (closest.empty() ? "" : "; did you mean '" + closest + "'?") +
                                     "; the geometries are " + list);
}

bool MeansGeometry(const std::string& word) {
  if (word.empty() || word == "-" || word.find('/') != std::string::npos) return false;
  for (const std::string_view ending : {".yaml", ".yml", ".json"}) {
    if (word.ends_with(ending)) return false;
  }
  std::error_code ignored;
  return !fs::exists(word, ignored) || fs::is_directory(word, ignored);
}

Result<std::unique_ptr<GeometryPlan>> GeometryPlan::Create(const CommandLine& line) {
  const std::string& name = line.arguments.front();
  OOM_ASSIGN_OR_RETURN(const std::string config, FindGeometry(name));
  std::unique_ptr<GeometryPlan> plan(new GeometryPlan());
  plan->request_.set_validate_only(true);
  v1::JobSpec& spec = *plan->request_.mutable_job()->mutable_spec();
  spec.set_name(line.Text("name", name));
  spec.mutable_model()->set_config(config);
  spec.mutable_model()->set_initialize(v1::INITIALIZATION_RANDOM);
  if (line.Has("layers")) {
    OOM_RETURN_IF_ERROR(plan->WriteConfig(config, line.Count("layers")));
  }
  spec.set_sequence_length(line.Count("sequence-length", kDefaultSequence));
  spec.set_global_batch(line.Count("global-batch", kDefaultBatch));
  spec.set_steps(1);
  spec.mutable_devices()->set_kind(line.Text("devices") == "cuda" ? v1::DEVICE_KIND_CUDA
                                                                  : v1::DEVICE_KIND_CPU);
  // Beyond 32 bits is as wrong as the largest of them, and oomd says what is right.
  constexpr int64_t kMostCount = std::numeric_limits<int32_t>::max();
  spec.mutable_devices()->set_count(
      static_cast<int32_t>(std::min(line.Count("device-count", 1), kMostCount)));
  spec.set_precision(line.Text("precision") == "float32" ? v1::PRECISION_FLOAT32
                                                         : v1::PRECISION_BFLOAT16);
  spec.mutable_budgets()->set_gpu_memory_bytes(line.Bytes("gpu-memory"));
  if (line.Has("host-memory")) {
    spec.mutable_budgets()->add_host_memory_bytes(line.Bytes("host-memory"));
  }
  return plan;
}

Status GeometryPlan::WriteConfig(const std::string& original, int64_t layers) {
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(original, kConfigLimitBytes));
  nlohmann::ordered_json config = nlohmann::ordered_json::parse(text, nullptr, false);
  if (!config.is_object()) {
    return Status(Code::kInvalidArgument, original + ": not a JSON object").WithField(original);
  }
  config[kLayersKey] = layers;
  OOM_ASSIGN_OR_RETURN(temporary_folder_, MakeTemporaryFolder());
  // oomd may have another current folder.
  std::error_code error;
  const std::string path = (fs::absolute(temporary_folder_, error) / kConfigName).string();
  if (error) return ErrnoStatus(error.value(), "cannot find " + temporary_folder_);
  OOM_RETURN_IF_ERROR(WriteFileAtomically(path, config.dump(2) + "\n"));
  request_.mutable_job()->mutable_spec()->mutable_model()->set_config(path);
  return Status::Ok();
}

GeometryPlan::~GeometryPlan() {
  if (temporary_folder_.empty()) return;
  std::error_code ignored;  // A folder that cannot be removed is left to the system's cleaning.
  fs::remove_all(temporary_folder_, ignored);
}

}  // namespace oom
