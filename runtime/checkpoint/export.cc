#include "runtime/checkpoint/export.h"

#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "runtime/model/hf_export.h"
#include "runtime/model/strict_json.h"
#include "runtime/model/unit.h"

namespace oom {
namespace {

constexpr int64_t kJobFileLimitBytes = int64_t{16} << 20;

// What an export needs of job.json: {"uid": "...", "spec": JobSpec as protobuf JSON}.
struct JobFile {
  std::string uid;
  std::string model_path;
  std::string model_config;
};

Result<JobFile> ReadJobFile(const std::string& output_directory) {
  const std::string path = output_directory + "/job.json";
  auto text = ReadFile(path, kJobFileLimitBytes);
  if (!text.ok()) {
    if (text.status().code() != Code::kNotFound) return text.status();
    return Status(Code::kNotFound,
                  output_directory + " is not the output directory of a job: it has no job.json");
  }
  OOM_ASSIGN_OR_RETURN(const nlohmann::json json, ParseStrictJson(*text, path));
  // A key that is not there is an empty string, as in protobuf JSON.
  const auto string_at = [&](const char* pointer) -> std::string {
    const nlohmann::json::json_pointer place(pointer);
    if (!json.contains(place) || !json.at(place).is_string()) return "";
    return json.at(place).get<std::string>();
  };
  JobFile job{.uid = string_at("/uid"),
              .model_path = string_at("/spec/model/path"),
              .model_config = string_at("/spec/model/config")};
  if (job.model_path.empty() && job.model_config.empty()) {
    return Status(Code::kInvalidArgument, path + ": spec.model has neither path nor config")
        .WithField("spec.model");
  }
  return job;
}

std::string StepsText(const std::vector<ListedCheckpoint>& listed) {
  if (listed.empty()) return "there is none";
  std::string text = "there are those of steps";
  for (auto it = listed.rbegin(); it != listed.rend(); ++it) {
    text += (it == listed.rbegin() ? " " : ", ") + std::to_string(it->step);
  }
  return text;
}

// The directory of the checkpoint to export.
Result<FoundCheckpoint> Choose(const ExportOptions& options, const JobFile& job) {
  if (options.step) {
    OOM_ASSIGN_OR_RETURN(const auto listed, ListCheckpoints(options.output_directory));
    for (const ListedCheckpoint& checkpoint : listed) {
      if (checkpoint.step != *options.step) continue;
      FoundCheckpoint found;
      found.path = checkpoint.path;
      OOM_ASSIGN_OR_RETURN(found.manifest, ReadCheckpointManifest(checkpoint.path));
      return found;
    }
    return Status(Code::kNotFound, "no checkpoint of step " + std::to_string(*options.step) +
                                       " in " + CheckpointsDirectory(options.output_directory) +
                                       "; " + StepsText(listed));
  }
  auto found = FindNewestCheckpoint(options.output_directory, {.job_uid = job.uid});
  // A job that has written none of its own yet stands where the one before it stopped.
  if (!found.ok() && found.status().code() == Code::kNotFound && !job.uid.empty()) {
    return FindNewestCheckpoint(options.output_directory);
  }
  return found;
}

}  // namespace

Result<ExportReport> ExportCheckpoint(const ExportOptions& options) {
  OOM_ASSIGN_OR_RETURN(const JobFile job, ReadJobFile(options.output_directory));
  OOM_ASSIGN_OR_RETURN(const FoundCheckpoint found, Choose(options, job));
  const ModelDescription& model = found.manifest.model;
  const std::vector<ParameterUnit> units = BuildUnits(model, 1);
  OOM_ASSIGN_OR_RETURN(const auto source, CheckpointSource::Open(found.path, units));
  ExportReport report{.destination = options.destination,
                      .checkpoint = found.path,
                      .step = found.manifest.step,
                      .skipped_count = static_cast<int>(found.skipped.size())};
  if (report.destination.empty()) {
    report.destination = options.output_directory + (options.state ? "/export-state" : "/export");
  }
  if (options.state) {
    OOM_RETURN_IF_ERROR(
        ExportState(*source, model, units, {.output_directory = report.destination}));
    return report;
  }
  HfExportOptions target{.output_directory = report.destination};
  if (!job.model_path.empty()) {
    target.template_directory = job.model_path;
  } else {
    OOM_ASSIGN_OR_RETURN(target.config_json, ReadFile(job.model_config, kJobFileLimitBytes));
    target.companion_directory = std::filesystem::path(job.model_config).parent_path().string();
  }
  if (found.manifest.precision == Precision::kFloat32) target.type = TensorType::kF32;
  OOM_RETURN_IF_ERROR(ExportHuggingFace(*source, model, units, target));
  return report;
}

}  // namespace oom
