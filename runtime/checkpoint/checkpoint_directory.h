// The checkpoints of an output directory: <output>/checkpoints/step-00000100/, each complete or not
// there. Anything named step-*.tmp.* is work in progress, or what is left of it; such a directory
// is locked (flock) while its writer lives. Functions; thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/checkpoint/manifest.h"

namespace oom {

std::string CheckpointsDirectory(const std::string& output_directory);
// "step-00000100"
std::string CheckpointName(int64_t step);

struct ListedCheckpoint {
  int64_t step = 0;
  std::string path;
};
// Directories named step-<N>, the newest first, whole or not. No checkpoints directory: none.
// Codes of ErrnoStatus.
Result<std::vector<ListedCheckpoint>> ListCheckpoints(const std::string& output_directory);

// Reads the manifest and holds directory name and file sizes against it, without reading the files.
// Fails with kNotFound (no such directory), kDataLoss (file named), kPermissionDenied.
Result<Manifest> ReadCheckpointManifest(const std::string& checkpoint_directory);

struct VerifyOptions {
  // Drops what was read from the page cache: reads what the disk holds, and leaves others' pages
  // alone.
  bool bypass_cache = false;
};
// Also reads every byte and checks every CRC, with several threads. Codes of
// ReadCheckpointManifest; the message names file and piece.
Status VerifyCheckpoint(const std::string& checkpoint_directory, const VerifyOptions& options = {});

struct SkippedCheckpoint {
  std::string path;
  Status status;
};
struct FoundCheckpoint {
  std::string path;
  Manifest manifest;
  std::vector<SkippedCheckpoint> skipped;  // Newer ones that are not whole, the newest first.
};
struct FindOptions {
  std::string job_uid;  // Not empty: only this job's checkpoints.
};
// The newest checkpoint that verifies. Fails with kNotFound if there is none at all, and with
// kDataLoss (reason CHECKPOINT_CORRUPT) if none of those that exist is whole.
Result<FoundCheckpoint> FindNewestCheckpoint(const std::string& output_directory,
                                             const FindOptions& options = {});

// Who wants to go on from a checkpoint.
struct ResumeRequest {
  std::string job_name;
  std::string job_uid;
  Precision precision = Precision::kBfloat16;
  ModelDescription model;
  // The user named this checkpoint: it may come from a job of another name.
  bool explicit_path = false;
};
// Fails with kFailedPrecondition, field "output" (another job's), "precision" or "model", both
// values named. A job of the same name may go on where an earlier submission stopped.
Status CheckResume(const Manifest& manifest, const ResumeRequest& request);

// Removes step-*.tmp.* that no living process writes. Codes of ErrnoStatus.
Status RemoveStaleTemporaries(const std::string& output_directory);

// Renames the checkpoint to a temporary name, then removes it, so that it is never half there under
// its own.
Status RemoveCheckpoint(const std::string& checkpoint_directory);

// Removes all checkpoints older than `newest_step` but the newest `keep` - 1 of them (keep counts
// at least as 2). The one at newest_step is verified first; if it is not whole nothing is removed.
// Later steps are another run's and stay. Returns the paths that were removed. Codes of
// VerifyCheckpoint and ErrnoStatus.
Result<std::vector<std::string>> ApplyRetention(const std::string& output_directory,
                                                int64_t newest_step, int keep);

// "1a2b3c4d5e6f7a8b": the end of a temporary name.
std::string RandomSuffix();

}  // namespace oom
