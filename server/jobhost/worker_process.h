// WorkerProcess is one running oom-worker: started with its control socket as descriptor 3, in its
// own process group, killed by the kernel when the job host dies, its output going to the rank's
// log. The destructor kills and reaps it with its whole group: no worker outlives its object. Start
// must be called by a thread that lives as long as the worker (the parent-death signal follows the
// thread). Not thread-safe, but for the channel, whose receiving side another thread may use.

#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/ipc/channel.h"
#include "server/jobhost/rank_log.h"

namespace oom {

// How a process ended.
struct ProcessExit {
  int exit_code = 0;
  int signal = 0;  // 0: it exited by itself.
  // "was killed by signal 9 (Killed)", "exited with code 3".
  std::string Describe() const;
};

class WorkerProcess {
 public:
  struct Options {
    std::string program;
    int rank = 0;
    RankLog::Options log;
  };

  // Fails with kNotFound or kPermissionDenied if the program cannot be run, else with codes of
  // ErrnoStatus.
  static Result<std::unique_ptr<WorkerProcess>> Start(const Options& options);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  int rank() const { return options_.rank; }
  pid_t pid() const { return pid_; }
  // Readable once the process has ended.
  int pidfd() const { return pidfd_.get(); }
  Channel& channel() { return *channel_; }
  const std::string& log_path() const { return options_.log.path; }

  // How it ended, or nothing while it runs. Does not reap it; any thread may call this until it is
  // reaped.
  std::optional<ProcessExit> Peek() const;
  // The same, and reaps it.
  std::optional<ProcessExit> Poll();
  // Waits at most that long for the end.
  std::optional<ProcessExit> WaitFor(std::chrono::milliseconds timeout);
  // To the whole group. Does nothing once the process was reaped.
  void Signal(int signal_number);
  // SIGKILL to the group, then reaps. What it wrote is in the log on return.
  ProcessExit Kill();

 private:
  explicit WorkerProcess(const Options& options) : options_(options) {}

  const Options options_;
  std::unique_ptr<RankLog> log_;
  std::unique_ptr<Channel> channel_;
  UniqueFd pidfd_;
  pid_t pid_ = -1;
  std::optional<ProcessExit> exit_;
};

// Kills and reaps every child of this process that is none of its workers any more: descendants
// that lost their parent (this process is their subreaper). Call when no WorkerProcess lives.
void ReapOrphans();

}  // namespace oom
