// The exit codes of `oom` (docs/CLI.md). Scripts depend on them: they never change.

#pragma once

#include "oom/v1/job.pb.h"
#include "runtime/base/status.h"

namespace oom {

enum ExitCode : int {
  kExitOk = 0,
  kExitError = 1,
  kExitUsage = 2,
  kExitNoDaemon = 3,
  kExitNotFound = 4,
  kExitDenied = 5,
  // The job file is wrong, or no plan fits the node.
  kExitInvalid = 6,
  kExitConflict = 7,
  kExitQuota = 8,
  kExitJobFailed = 10,
  kExitJobCancelled = 11,
  kExitTimeout = 124,
  kExitDetached = 130,
};

ExitCode ExitCodeOf(const Status& status);

// Of a job in a terminal state.
ExitCode ExitCodeOf(v1::JobState state);

bool IsTerminal(v1::JobState state);

}  // namespace oom
