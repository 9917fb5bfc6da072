// "<job directory>/host.pid": which process runs the job, by its number and its start time, so that a number that the
// kernel has given to another process is never taken for it; and whether it runs at all: oomd writes the file for a child
// that it has forked, before that becomes the job host, and the job host writes it again. What never ran has not failed.
// Thread-safe.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "runtime/base/status.h"

namespace oom {

struct HostPid {
  pid_t pid = 0;
  uint64_t start_ticks = 0;  // As of ProcessStartTicks(); 0: it was gone.
  bool is_running = false;   // The job host itself says so.
};

// Field 22 of /proc/<pid>/stat: clock ticks from boot to the start of the process; 0 if it is gone.
uint64_t ProcessStartTicks(pid_t pid);

Status WriteHostPid(const std::string& job_directory, const HostPid& host);

// Fails with kNotFound where there is no such file, kDataLoss where it names no process.
Result<HostPid> ReadHostPid(const std::string& job_directory);

// For the daemon that has seen the end of that process: it must not be taken for the end of the next one, should the daemon
// die before it has started that.
void RemoveHostPid(const std::string& job_directory);

}  // namespace oom
