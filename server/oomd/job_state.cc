#include "server/oomd/job_state.h"

namespace oom {

using v1::JobState;

bool IsTerminal(JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

bool IsActive(JobState state) {
  return state == v1::JOB_STATE_STARTING || state == v1::JOB_STATE_RUNNING ||
         state == v1::JOB_STATE_RECOVERING || state == v1::JOB_STATE_STOPPING;
}

bool MayFollow(JobState from, JobState to) {
  switch (from) {
    case v1::JOB_STATE_QUEUED:
      // FAILED: it can never start (its host does not launch, the node has become too small).
      return to == v1::JOB_STATE_STARTING || to == v1::JOB_STATE_SUSPENDED ||
             to == v1::JOB_STATE_CANCELLED || to == v1::JOB_STATE_FAILED;
    case v1::JOB_STATE_SUSPENDED:
      return to == v1::JOB_STATE_QUEUED || to == v1::JOB_STATE_CANCELLED;
    case v1::JOB_STATE_STARTING:
      return IsActive(to) || IsTerminal(to) || to == v1::JOB_STATE_SUSPENDED;
    case v1::JOB_STATE_RUNNING:
      // A new attempt begins with RECOVERING, never straight with STARTING.
      return (IsActive(to) && to != v1::JOB_STATE_STARTING) || IsTerminal(to) ||
             to == v1::JOB_STATE_SUSPENDED;
    case v1::JOB_STATE_RECOVERING:
      return IsActive(to) || IsTerminal(to) || to == v1::JOB_STATE_SUSPENDED;
    case v1::JOB_STATE_STOPPING:
      // RECOVERING: what went wrong while a finished job wrote its last checkpoint or its export.
      return to == v1::JOB_STATE_STOPPING || to == v1::JOB_STATE_RECOVERING || IsTerminal(to) ||
             to == v1::JOB_STATE_SUSPENDED;
    default:
      return false;
  }
}

std::string StateName(JobState state) {
  const std::string& name = v1::JobState_Name(state);
  const std::string prefix = "JOB_STATE_";
  return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : "UNSPECIFIED";
}

}  // namespace oom
