// JobRecord is a job as the daemon keeps it: the public message, and what only the daemon needs.
// A value.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "oom/v1/job.pb.h"

namespace oom {

struct JobRecord {
  v1::Job job;
  std::vector<internal::v1::Pool> pools;
  // Devices of its kind that its ranks compute on, while it is active: a restarted daemon must not give them away.
  std::vector<int> devices;

  // Order of submission: the queue is FIFO in it, and lists are paged by it.
  int64_t submit_order = 0;
  // Number of the job host's last transition that is recorded here.
  int64_t last_transition = 0;
  // durable_step of the last failure; -1: none yet.
  int64_t last_failure_durable_step = -1;
  // A stop that is under way: the final state that was asked for, or UNSPECIFIED.
  v1::JobState stop_state = v1::JOB_STATE_UNSPECIFIED;
  bool stop_with_checkpoint = false;
  double stop_grace_seconds = 0;
  // The daemon's own id of "jobs/<id>".
  std::string id() const { return job.name().substr(job.name().find('/') + 1); }
};

// "[a-z]([a-z0-9-]{0,61}[a-z0-9])?".
bool IsValidJobId(const std::string& id);

// The nearest valid id to a free name: "My Run_2" -> "my-run-2"; "" -> "job".
std::string MakeJobId(const std::string& name);

// A UUIDv7: `unix_seconds` in the first 48 bits, then `random` (74 bits of it are used).
std::string MakeUuid7(double unix_seconds, uint64_t random_high, uint64_t random_low);

// FNV-1a of `data`, for payload hashes and token checks (not against an adversary).
uint64_t HashBytes(const std::string& data);

// `job` without its plan and model: what lists and events carry, which stay small that way.
v1::Job Brief(const v1::Job& job);

}  // namespace oom
