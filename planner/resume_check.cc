#include "planner/resume_check.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"

namespace oom {
namespace {

constexpr int64_t kJobFileLimitBytes = int64_t{64} << 20;

Status Refuse(Status status, const std::string& field) {
  Status about = status.Annotate(field);
  return std::move(about).WithReason("INVALID_INPUT").WithField(field);
}

Status CheckOwner(const v1::JobSpec& spec) {
  const Result<std::string> text = ReadFile(spec.output() + "/job.json", kJobFileLimitBytes);
  if (!text.ok()) {
    return text.status().code() == Code::kNotFound ? Status::Ok() : Refuse(text.status(), "output");
  }
  const nlohmann::json job = nlohmann::json::parse(*text, nullptr, false);
  const auto found = job.is_object() ? job.find("spec") : job.end();
  if (!job.is_object() || found == job.end() || !found->is_object()) {
    return Refuse(Status(Code::kInvalidArgument, spec.output() + "/job.json is no job of OOM; "
                                                                 "choose another output directory"),
                  "output");
  }
  const auto name = found->find("name");
  const std::string owner = name != found->end() && name->is_string() ? name->get<std::string>() : "";
  if (owner == spec.name()) return Status::Ok();
  return Refuse(Status(Code::kInvalidArgument, "the directory " + spec.output() + " belongs to job '" +
                                                   owner + "', this job is '" + spec.name() + "'"),
                "output");
}

}  // namespace

Status CheckResumable(const v1::JobSpec& spec, const ModelDescription& model, Precision precision) {
  OOM_RETURN_IF_ERROR(CheckOwner(spec));
  ResumeRequest request = {.job_name = spec.name(), .precision = precision, .model = model};
  if (spec.resume() == "never") return Status::Ok();
  if (spec.resume() != "auto") {
    request.explicit_path = true;
    const Result<Manifest> manifest = ReadCheckpointManifest(spec.resume());
    if (!manifest.ok()) return Refuse(manifest.status(), "resume");
    const Status fits = CheckResume(*manifest, request);
    return fits.ok() ? fits : Refuse(fits, fits.field());
  }
  // The newest whose manifest can be read; the others are passed over when the job starts, too.
  const auto listed = ListCheckpoints(spec.output());
  if (!listed.ok()) return Refuse(listed.status(), "output");
  for (const ListedCheckpoint& checkpoint : *listed) {
    const Result<Manifest> manifest = ReadCheckpointManifest(checkpoint.path);
    if (!manifest.ok()) continue;
    const Status fits = CheckResume(*manifest, request);
    return fits.ok() ? fits : Refuse(fits.Annotate(checkpoint.path), fits.field());
  }
  return Status::Ok();
}

}  // namespace oom
