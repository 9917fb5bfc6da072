// The job's output directory: who owns it, what is written into it at the start, and from which
// checkpoint an attempt goes on. The directory is the user's; it may hold anything. Not
// thread-safe.

#pragma once

#include <memory>
#include <optional>
#include <string>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "server/jobhost/job_context.h"

namespace oom {

// Where an attempt starts.
struct StartingPoint {
  int64_t completed_steps = 0;
  std::string checkpoint_path;  // Empty: from the model.
  bool in_own_output = false;   // The checkpoint is one of this output directory.
};

class OutputDirectory {
 public:
  // Creates the directory, locks it for this job host, refuses it if another job's job.json lies
  // there, and writes job.json and plan.json. Fails with kInvalidArgument (reason INVALID_INPUT,
  // field "output", both jobs named; or another job host runs in it), kPermissionDenied,
  // kResourceExhausted (STORAGE_FULL).
  static Result<std::unique_ptr<OutputDirectory>> Claim(const internal::v1::JobStart& start);

  const std::string& path() const { return path_; }
  // <output>/logs/attempt-<A>/<file>, with the folder made.
  Result<std::string> LogPath(int attempt, const std::string& file) const;
  Status MakeDirectory(const std::string& name) const;

  // The newest whole checkpoint that `resume` allows, or the model. `is_first` is the first attempt
  // of the job: then "never" looks at no checkpoint, else only at this job's own. Fails with
  // kInvalidArgument (reason INVALID_INPUT: another job's output, another precision or model, a
  // named checkpoint that is not whole) or kDataLoss (reason CHECKPOINT_CORRUPT: none of those that
  // exist is whole).
  Result<StartingPoint> FindStart(const JobContext& context, bool is_first) const;

 private:
  explicit OutputDirectory(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  UniqueFd lock_;
};

}  // namespace oom
