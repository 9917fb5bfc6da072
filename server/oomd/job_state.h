// The state machine of a job: which state may follow which, and how a reported state applies to a
// job that the user has asked to stop. Pure functions.

#pragma once

#include <string>

#include "oom/v1/job.pb.h"

namespace oom {

// SUCCEEDED, FAILED, CANCELLED: final for ever.
bool IsTerminal(v1::JobState state);

// STARTING, RUNNING, RECOVERING, STOPPING: the job holds devices and pools, and has (or had) a job
// host.
bool IsActive(v1::JobState state);

// Terminal states allow nothing. A state "follows" itself when the job is active: a job host
// repeats it with a new attempt or message.
bool MayFollow(v1::JobState from, v1::JobState to);

// "RUNNING".
std::string StateName(v1::JobState state);

}  // namespace oom
