// Starting a job host, and recognising it again by "<job directory>/host.pid"
// (server/jobhost/host_pid_file.h). Thread-safe.

#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

struct HostProcess {
  pid_t pid = 0;
  UniqueFd pidfd;
};

struct SpawnOptions {
  std::string program;
  std::vector<std::string> arguments;  // Without the program's name.
  std::string directory;               // Gets host.pid, and host.log with stdout and stderr.
  std::vector<int> descriptors;        // Become first_fd, first_fd + 1, ...; all others are closed.
  int first_fd = 10;
};

// In its own session; writes host.pid before the program runs. Codes of ErrnoStatus, also for a
// program that cannot be executed.
Result<HostProcess> SpawnHost(const SpawnOptions& options);

// The process that host.pid of `directory` names, if it is that process and alive. Fails with
// kNotFound if there is no host.pid, or one of a process that ended before it ran as a job host;
// kUnavailable if the job host is gone. Waits some milliseconds for one that is just starting.
Result<HostProcess> FindHost(const std::string& directory);

}  // namespace oom
