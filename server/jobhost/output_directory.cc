#include "server/jobhost/output_directory.h"

#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"

namespace oom {
namespace {

constexpr int64_t kJsonLimitBytes = int64_t{64} << 20;

Result<std::string> ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return Status(Code::kInternal, "cannot write JSON: " + status.ToString());
  return text;
}

Status InvalidInput(std::string message, std::string field) {
  return Status(Code::kInvalidArgument, std::move(message))
      .WithReason("INVALID_INPUT")
      .WithField(std::move(field));
}

Status StorageStatus(const Status& status) {
  if (status.code() != Code::kResourceExhausted || !status.reason().empty()) return status;
  Status copy = status;
  return std::move(copy).WithReason("STORAGE_FULL");
}

// The output of another job is left alone, whatever `resume` says.
Status CheckOwner(const std::string& path, const internal::v1::JobStart& start) {
  const Result<std::string> text = ReadFile(path + "/job.json", kJsonLimitBytes);
  if (!text.ok()) {
    return text.status().code() == Code::kNotFound ? Status::Ok() : text.status();
  }
  const auto json = nlohmann::ordered_json::parse(text.value(), nullptr, false);
  if (!json.is_object() || !json.contains("uid") || !json["uid"].is_string() ||
      !json.contains("spec") || !json["spec"].is_object()) {
    return InvalidInput(path + "/job.json is no job of OOM; choose another output directory",
                        "output");
  }
  if (json["uid"] == start.uid()) return Status::Ok();
  const auto name = json["spec"].find("name");
  const std::string other =
      name != json["spec"].end() && name->is_string() ? name->get<std::string>() : "";
  if (other == start.spec().name()) return Status::Ok();
  return InvalidInput("the output directory " + path + " belongs to job '" + other +
                          "', this job is '" + start.spec().name() + "'",
                      "output");
}

std::string JoinSkipped(const std::vector<SkippedCheckpoint>& skipped) {
  std::string text;
  for (const SkippedCheckpoint& one : skipped)
    text += " " + one.path + " (" + one.status.message() + ")";
  return text;
}

}  // namespace

Result<std::unique_ptr<OutputDirectory>> OutputDirectory::Claim(
    const internal::v1::JobStart& start) {
  const std::string& path = start.spec().output();
  if (const Status made = MakeDirectories(path); !made.ok()) {
    if (made.code() == Code::kResourceExhausted) return StorageStatus(made);
    return InvalidInput("the output directory cannot be made: " + made.message(), "output");
  }
  std::unique_ptr<OutputDirectory> output(new OutputDirectory(path));
  output->lock_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!output->lock_.valid()) {
    return InvalidInput(ErrnoStatus(errno, "cannot open " + path).message(), "output");
  }
  if (::flock(output->lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    return InvalidInput("another running job writes to the output directory " + path, "output");
  }
  OOM_RETURN_IF_ERROR(CheckOwner(path, start));

  OOM_ASSIGN_OR_RETURN(const std::string spec_json, ToJson(start.spec()));
  OOM_ASSIGN_OR_RETURN(const std::string plan_json, ToJson(start.plan()));
  nlohmann::ordered_json job;
  job["uid"] = start.uid();
  job["spec"] = nlohmann::ordered_json::parse(spec_json);
  if (const Status written = WriteFileAtomically(path + "/job.json", job.dump(2) + "\n");
      !written.ok()) {
    if (written.code() == Code::kResourceExhausted) return StorageStatus(written);
    return InvalidInput("the output directory is not writable: " + written.message(), "output");
  }
  const Status written = WriteFileAtomically(path + "/plan.json", plan_json);
  if (!written.ok()) return StorageStatus(written);
  return output;
}

Status OutputDirectory::MakeDirectory(const std::string& name) const {
  return MakeDirectories(path_ + "/" + name);
}

Result<std::string> OutputDirectory::LogPath(int attempt, const std::string& file) const {
  const std::string folder = path_ + "/logs/attempt-" + std::to_string(attempt);
  if (const Status made = MakeDirectories(folder); !made.ok()) return StorageStatus(made);
  return folder + "/" + file;
}

Result<StartingPoint> OutputDirectory::FindStart(const JobContext& context, bool is_first) const {
  const std::string& resume = context.spec().resume();
  const bool never = resume == "never";
  const bool automatic = resume.empty() || resume == "auto";
  if (never && is_first) return StartingPoint{};
  ResumeRequest request = {.job_name = context.spec().name(),
                           .job_uid = context.start().uid(),
                           .precision = context.precision(),
                           .model = context.model()};
  FindOptions find;
  if (!automatic) find.job_uid = context.start().uid();
  auto found = FindNewestCheckpoint(path_, find);
  if (found.ok()) {
    if (!found->skipped.empty()) {
      spdlog::warn("checkpoints that are not whole were passed over:{}",
                   JoinSkipped(found->skipped));
    }
    if (const Status fits = CheckResume(found->manifest, request); !fits.ok()) {
      return InvalidInput(fits.message(), fits.field());
    }
    return StartingPoint{.completed_steps = found->manifest.step,
                         .checkpoint_path = found->path,
                         .in_own_output = true};
  }
  if (found.status().code() != Code::kNotFound) return found.status();
  if (automatic || never) return StartingPoint{};

  request.explicit_path = true;
  Status usable = VerifyCheckpoint(resume, {});
  if (!usable.ok()) return InvalidInput("resume: " + usable.message(), "resume");
  OOM_ASSIGN_OR_RETURN(const Manifest manifest, ReadCheckpointManifest(resume));
  if (const Status fits = CheckResume(manifest, request); !fits.ok()) {
    return InvalidInput("resume: " + fits.message(), fits.field());
  }
  return StartingPoint{.completed_steps = manifest.step, .checkpoint_path = resume};
}

}  // namespace oom
