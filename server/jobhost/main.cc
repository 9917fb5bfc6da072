// oom-jobhost: runs one job. Started by oomd with --start <job.pb> and the job's pools as inherited
// descriptors.

#include <fcntl.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/file.h"
#include "server/jobhost/host_log.h"
#include "server/jobhost/host_pid_file.h"
#include "server/jobhost/job_machine.h"

namespace oom {
namespace {

constexpr int64_t kStartLimitBytes = int64_t{64} << 20;

Result<internal::v1::JobStart> ReadStart(const std::string& path) {
  OOM_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path, kStartLimitBytes));
  internal::v1::JobStart start;
  if (!start.ParseFromString(bytes)) {
    return Status(Code::kInvalidArgument, path + ": this is no JobStart message");
  }
  return start;
}

// Takes over the inherited pools; workers get theirs by message, not by inheritance.
Result<std::vector<UniqueFd>> TakePools(const internal::v1::JobStart& start) {
  std::vector<UniqueFd> pools;
  for (int index = 0; index < start.pools_size(); ++index) {
    UniqueFd fd(start.first_pool_fd() + index);
    if (::fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) {
      fd.Release();
      return Status(Code::kInvalidArgument, "pool " + std::to_string(index) +
                                                " is not open as descriptor " +
                                                std::to_string(start.first_pool_fd() + index));
    }
    pools.push_back(std::move(fd));
  }
  return pools;
}

Status RunHost(const std::string& start_path, double silence_seconds, double absence_seconds) {
  // Outlives its daemon and whatever terminal that had.
  ::signal(SIGHUP, SIG_IGN);
  ::signal(SIGPIPE, SIG_IGN);
  // What a worker leaves behind becomes our child, so that it can be ended.
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return ErrnoStatus(errno, "PR_SET_CHILD_SUBREAPER");
  HostLog log;
  JobMachine::Options options;
  OOM_ASSIGN_OR_RETURN(options.start, ReadStart(start_path));
  OOM_ASSIGN_OR_RETURN(options.pool_fds, TakePools(options.start));
  OOM_RETURN_IF_ERROR(WriteHostPid(
      options.start.job_directory(),
      {.pid = ::getpid(), .start_ticks = ProcessStartTicks(::getpid()), .is_running = true}));
  options.topology = MakeSystemTopology();
  options.log = &log;
  options.worker_silence_limit = std::chrono::duration<double>(silence_seconds);
  options.daemon_absence_limit =
      std::chrono::milliseconds(static_cast<int64_t>(absence_seconds * 1000.0));
  JobMachine machine(std::move(options));
  return machine.Run();
}

}  // namespace
}  // namespace oom

int main(int argument_count, char** arguments) {
  std::string start_path;
  double silence_seconds = 120.0;
  double absence_seconds = 10.0;
  CLI::App app("Runs one job of oomd", "oom-jobhost");
  app.add_option("--start", start_path, "The JobStart message that oomd wrote")->required();
  app.add_option("--worker-silence-seconds", silence_seconds,
                 "A worker without a sign of life for that long is hung")
      ->envname("OOM_WORKER_SILENCE_SECONDS")
      ->check(CLI::PositiveNumber);
  app.add_option("--daemon-absence-seconds", absence_seconds,
                 "An ephemeral job ends when its daemon is gone for that long")
      ->envname("OOM_DAEMON_ABSENCE_SECONDS")
      ->check(CLI::PositiveNumber);
  try {
    app.parse(argument_count, arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const oom::Status status = oom::RunHost(start_path, silence_seconds, absence_seconds);
  if (status.ok()) return 0;
  std::fprintf(stderr, "oom-jobhost: %s\n", status.ToString().c_str());
  return 1;
}
