#include "runtime/checkpoint/checkpoint_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "runtime/base/file.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"
#include "runtime/checkpoint/piece_reader.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp.";

std::optional<int64_t> StepOfName(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || end != digits.data() + digits.size() || step < 0) return std::nullopt;
  if (CheckpointName(step) != name) return std::nullopt;
  return step;
}

bool IsTemporaryName(std::string_view name) {
  return name.starts_with(kPrefix) && name.find(kTemporary) != std::string_view::npos;
}

// Names of the entries of a directory; none if it does not exist.
Result<std::vector<std::string>> EntryNames(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator iterator(directory, error);
  if (error) {
    if (error == std::errc::no_such_file_or_directory) return names;
    return ErrnoStatus(error.value(), "cannot read directory " + directory);
  }
  while (iterator != fs::directory_iterator()) {
    names.push_back(iterator->path().filename().string());
    iterator.increment(error);
    if (error) return ErrnoStatus(error.value(), "cannot read directory " + directory);
  }
  return names;
}

Status RemoveTree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) return ErrnoStatus(error.value(), "cannot remove " + path);
  return Status::Ok();
}

Status CheckFileSize(const std::string& path, int64_t expected_bytes) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return Status(Code::kDataLoss, path + " is missing");
    return ErrnoStatus(errno, "cannot stat " + path);
  }
  if (!S_ISREG(info.st_mode)) return Status(Code::kDataLoss, path + " is not a regular file");
  if (info.st_size != expected_bytes) {
    return Status(Code::kDataLoss, path + " has " + std::to_string(info.st_size) +
                                       " bytes; its manifest says " +
                                       std::to_string(expected_bytes));
  }
  return Status::Ok();
}

Status VerifyFile(const std::string& path, const ManifestFile& file, const VerifyOptions& options) {
  OOM_ASSIGN_OR_RETURN(auto reader, PieceReader::Open(path, file));
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(kPieceBytes, file.bytes)));
  for (int64_t piece = 0; piece < PieceCount(file.bytes); ++piece) {
    if (options.bypass_cache) reader->DropFromCache(piece);
    const auto bytes = reader->ReadPiece(piece, buffer);
    if (!bytes.ok()) return bytes.status();
    if (options.bypass_cache) reader->DropFromCache(piece);
  }
  return Status::Ok();
}

}  // namespace

std::string CheckpointsDirectory(const std::string& output_directory) {
  return output_directory + "/checkpoints";
}

std::string CheckpointName(int64_t step) {
  char name[40];
  std::snprintf(name, sizeof(name), "step-%08lld", static_cast<long long>(step));
  return name;
}

std::string RandomSuffix() {
  std::random_device random;
  char text[17];
  std::snprintf(text, sizeof(text), "%08x%08x", random(), random());
  return text;
}

Result<std::vector<ListedCheckpoint>> ListCheckpoints(const std::string& output_directory) {
  const std::string directory = CheckpointsDirectory(output_directory);
  OOM_ASSIGN_OR_RETURN(const std::vector<std::string> names, EntryNames(directory));
  std::vector<ListedCheckpoint> listed;
  for (const std::string& name : names) {
    const std::optional<int64_t> step = StepOfName(name);
    if (step.has_value()) listed.push_back({.step = *step, .path = directory + "/" + name});
  }
  std::sort(listed.begin(), listed.end(),
            [](const auto& a, const auto& b) { return a.step > b.step; });
  return listed;
}

Result<Manifest> ReadCheckpointManifest(const std::string& checkpoint_directory) {
  struct stat info {};
  if (::stat(checkpoint_directory.c_str(), &info) != 0) {
    return ErrnoStatus(errno, "checkpoint " + checkpoint_directory);
  }
  const std::string path = checkpoint_directory + "/" + std::string(kManifestName);
  auto text = ReadFile(path, kManifestLimitBytes);
  if (!text.ok()) {
    if (text.status().code() == Code::kPermissionDenied) return text.status();
    return Status(Code::kDataLoss, text.status().message());
  }
  OOM_ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(*text, path));
  // A manifest of another step, copied here or left behind, is not this checkpoint's.
  const std::string name = fs::path(checkpoint_directory + "/").parent_path().filename().string();
  const std::optional<int64_t> step = StepOfName(name);
  if (step.has_value() && *step != manifest.step) {
    return Status(Code::kDataLoss, path + " is of step " + std::to_string(manifest.step));
  }
  for (const ManifestFile& file : manifest.files) {
    OOM_RETURN_IF_ERROR(CheckFileSize(checkpoint_directory + "/" + file.name, file.bytes));
  }
  return manifest;
}

Status VerifyCheckpoint(const std::string& checkpoint_directory, const VerifyOptions& options) {
  OOM_ASSIGN_OR_RETURN(const Manifest manifest, ReadCheckpointManifest(checkpoint_directory));
  Mutex mutex;
  Status first_error;
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto verify_files = [&] {
    while (!failed) {
      const size_t index = next.fetch_add(1);
      if (index >= manifest.files.size()) return;
      const ManifestFile& file = manifest.files[index];
      Status status = VerifyFile(checkpoint_directory + "/" + file.name, file, options);
      if (status.ok()) continue;
      MutexLock lock(mutex);
      if (first_error.ok()) first_error = std::move(status);
      failed = true;
    }
  };
  const size_t cpu_count = std::max(1u, std::thread::hardware_concurrency());
  const size_t thread_count = std::min({manifest.files.size(), size_t{8}, cpu_count});
  std::vector<std::thread> threads;
  for (size_t i = 1; i < thread_count; ++i) threads.emplace_back(verify_files);
  verify_files();
  for (std::thread& thread : threads) thread.join();
  return first_error;
}

Result<FoundCheckpoint> FindNewestCheckpoint(const std::string& output_directory,
                                             const FindOptions& options) {
  OOM_ASSIGN_OR_RETURN(const auto listed, ListCheckpoints(output_directory));
  FoundCheckpoint found;
  for (const ListedCheckpoint& checkpoint : listed) {
    auto manifest = ReadCheckpointManifest(checkpoint.path);
    if (manifest.ok() && !options.job_uid.empty() && manifest->job_uid != options.job_uid) continue;
    Status status = manifest.ok() ? VerifyCheckpoint(checkpoint.path) : manifest.status();
    if (status.ok()) {
      found.path = checkpoint.path;
      found.manifest = *std::move(manifest);
      return found;
    }
    found.skipped.push_back({.path = checkpoint.path, .status = std::move(status)});
  }
  if (found.skipped.empty()) {
    return Status(Code::kNotFound, "no checkpoint in " + CheckpointsDirectory(output_directory));
  }
  return Status(Code::kDataLoss,
                "none of the " + std::to_string(found.skipped.size()) + " checkpoints in " +
                    CheckpointsDirectory(output_directory) +
                    " is whole; the newest: " + found.skipped.front().status.message())
      .WithReason("CHECKPOINT_CORRUPT")
      .WithField(found.skipped.front().path);
}

Status CheckResume(const Manifest& manifest, const ResumeRequest& request) {
  const auto refuse = [](const std::string& message, const std::string& field) {
    return Status(Code::kFailedPrecondition, message).WithReason("INVALID_INPUT").WithField(field);
  };
  const bool same_job =
      manifest.job_uid == request.job_uid || manifest.job_name == request.job_name;
  if (!same_job && !request.explicit_path) {
    return refuse("the output directory holds checkpoints of job \"" + manifest.job_name + "\" (" +
                      manifest.job_uid + "), not of \"" + request.job_name + "\"",
                  "output");
  }
  if (manifest.precision != request.precision) {
    return refuse("the checkpoint was written with precision " +
                      std::string(PrecisionName(manifest.precision)) + ", the job wants " +
                      std::string(PrecisionName(request.precision)),
                  "precision");
  }
  const std::string difference = ModelDifference(manifest.model, request.model);
  if (!difference.empty()) {
    return refuse("the checkpoint is of another model: " + difference + " (the job's)", "model");
  }
  return Status::Ok();
}

Status RemoveStaleTemporaries(const std::string& output_directory) {
  const std::string directory = CheckpointsDirectory(output_directory);
  OOM_ASSIGN_OR_RETURN(const std::vector<std::string> names, EntryNames(directory));
  for (const std::string& name : names) {
    if (!IsTemporaryName(name)) continue;
    const std::string path = directory + "/" + name;
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (!fd.valid() && errno == ENOENT) continue;  // Its writer was faster.
    if (fd.valid() && ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) continue;
    OOM_RETURN_IF_ERROR(RemoveTree(path));
  }
  return Status::Ok();
}

Status RemoveCheckpoint(const std::string& checkpoint_directory) {
  const std::string condemned = checkpoint_directory + std::string(kTemporary) + RandomSuffix();
  if (::rename(checkpoint_directory.c_str(), condemned.c_str()) != 0) {
    return ErrnoStatus(errno, "cannot rename " + checkpoint_directory);
  }
  return RemoveTree(condemned);
}

Result<std::vector<std::string>> ApplyRetention(const std::string& output_directory,
                                                int64_t newest_step, int keep) {
  OOM_ASSIGN_OR_RETURN(const auto listed, ListCheckpoints(output_directory));
  std::vector<std::string> old;
  int kept = 1;
  for (const ListedCheckpoint& checkpoint : listed) {
    if (checkpoint.step >= newest_step) continue;
    if (kept < std::max(keep, 2)) {
      // One that is not whole is no fallback and does not count; it goes with the oldest.
      if (ReadCheckpointManifest(checkpoint.path).ok()) ++kept;
      continue;
    }
    old.push_back(checkpoint.path);
  }
  if (old.empty()) return old;
  const std::string newest =
      CheckpointsDirectory(output_directory) + "/" + CheckpointName(newest_step);
  OOM_RETURN_IF_ERROR(VerifyCheckpoint(newest, {.bypass_cache = true}));
  for (const std::string& path : old) OOM_RETURN_IF_ERROR(RemoveCheckpoint(path));
  OOM_RETURN_IF_ERROR(SyncDirectory(CheckpointsDirectory(output_directory)));
  return old;
}

}  // namespace oom
