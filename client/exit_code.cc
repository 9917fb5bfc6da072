#include "client/exit_code.h"

namespace oom {

ExitCode ExitCodeOf(const Status& status) {
  // A file that the job names is missing or broken: the job is wrong, whatever the code of the
  // file's error.
  if (!status.ok() && status.reason() == "INVALID_INPUT") return kExitInvalid;
  switch (status.code()) {
    case Code::kOk:
      return kExitOk;
    case Code::kInvalidArgument:
      return kExitInvalid;
    case Code::kDeadlineExceeded:
      return kExitTimeout;
    case Code::kNotFound:
      return kExitNotFound;
    case Code::kPermissionDenied:
    case Code::kUnauthenticated:
      return kExitDenied;
    case Code::kAlreadyExists:
    case Code::kFailedPrecondition:
    case Code::kAborted:
      return kExitConflict;
    case Code::kResourceExhausted:
      // The node cannot hold the job, whoever asks and whenever: that is about the job, not a
      // quota.
      return status.reason() == "OUT_OF_HOST_MEMORY" || status.reason() == "OUT_OF_GPU_MEMORY" ||
                     status.reason() == "STORAGE_FULL" || status.reason() == "NOT_ENOUGH_DEVICES"
                 ? kExitInvalid
                 : kExitQuota;
    case Code::kUnavailable:
      return kExitNoDaemon;
    case Code::kCancelled:
      return kExitDetached;
    case Code::kOutOfRange:
    case Code::kInternal:
    case Code::kDataLoss:
      return kExitError;
  }
  return kExitError;
}

ExitCode ExitCodeOf(v1::JobState state) {
  switch (state) {
    case v1::JOB_STATE_SUCCEEDED:
      return kExitOk;
    case v1::JOB_STATE_FAILED:
      return kExitJobFailed;
    case v1::JOB_STATE_CANCELLED:
      return kExitJobCancelled;
    default:
      return kExitError;
  }
}

bool IsTerminal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

}  // namespace oom
