#include "server/oomd/host_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "runtime/base/check.h"
#include "server/jobhost/host_pid_file.h"

namespace oom {
namespace {

// From fork to the job host's own word that it runs.
constexpr std::chrono::seconds kStartLimit(5);
constexpr int kLookMilliseconds = 5;

UniqueFd OpenPidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

// Everything that the child needs, made before fork: after it only system calls are safe.
struct ChildPlan {
  const char* program = nullptr;
  char* const* arguments = nullptr;
  int log_fd = -1;
  int error_fd = -1;  // Close-on-exec; gets errno if something fails.
  const int* descriptors = nullptr;
  int descriptor_count = 0;
  int first_fd = 0;
};

void CloseFrom(unsigned first, unsigned last) {
  if (first > last) return;
  if (syscall(SYS_close_range, first, last, 0U) == 0) return;
  for (unsigned fd = first; fd <= last && fd < 65536; ++fd) close(static_cast<int>(fd));
}

[[noreturn]] void RunChild(const ChildPlan& plan) {
  const auto fail = [&] {
    const int error = errno;
    static_cast<void>(!write(plan.error_fd, &error, sizeof(error)));
    _exit(127);
  };
  setsid();
  // Above every target first, so that no target overwrites a source.
  const int floor = plan.first_fd + plan.descriptor_count + 1;
  int copies[256];
  for (int i = 0; i < plan.descriptor_count; ++i) {
    copies[i] = fcntl(plan.descriptors[i], F_DUPFD, floor);
    if (copies[i] < 0) fail();
  }
  const int error_fd = fcntl(plan.error_fd, F_DUPFD_CLOEXEC, floor);
  const int null_fd = open("/dev/null", O_RDONLY);
  if (error_fd < 0 || null_fd < 0) fail();
  if (dup2(null_fd, 0) < 0 || dup2(plan.log_fd, 1) < 0 || dup2(plan.log_fd, 2) < 0) fail();
  for (int i = 0; i < plan.descriptor_count; ++i) {
    if (dup2(copies[i], plan.first_fd + i) < 0) fail();
  }
  // The report of a failed exec has the one place behind the targets.
  const int report_fd = plan.first_fd + plan.descriptor_count;
  if (dup3(error_fd, report_fd, O_CLOEXEC) < 0) fail();
  CloseFrom(3, static_cast<unsigned>(plan.first_fd) - 1);
  CloseFrom(static_cast<unsigned>(report_fd) + 1, ~0U);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  execv(plan.program, plan.arguments);
  const int error = errno;
  static_cast<void>(!write(report_fd, &error, sizeof(error)));
  _exit(127);
}

}  // namespace

Result<HostProcess> SpawnHost(const SpawnOptions& options) {
  OOM_CHECK(options.descriptors.size() <= 256);
  const std::string log_path = options.directory + "/host.log";
  const UniqueFd log(
      open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!log.valid()) return ErrnoStatus(errno, log_path);
  int gate[2];
  int report[2];
  if (pipe2(gate, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  UniqueFd gate_read(gate[0]);
  UniqueFd gate_write(gate[1]);
  if (pipe2(report, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd report_read(report[0]);
  UniqueFd report_write(report[1]);

  std::vector<char*> arguments = {const_cast<char*>(options.program.c_str())};
  for (const std::string& argument : options.arguments)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const ChildPlan plan{.program = options.program.c_str(),
                       .arguments = arguments.data(),
                       .log_fd = log.get(),
                       .error_fd = report_write.get(),
                       .descriptors = options.descriptors.data(),
                       .descriptor_count = static_cast<int>(options.descriptors.size()),
                       .first_fd = options.first_fd};
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus(errno, "fork");
  if (pid == 0) {
    // The program runs only after host.pid is written: a daemon that dies in between leaves no host
    // that its successor does not know.
    char go = 0;
    close(gate_write.get());
    if (read(gate_read.get(), &go, 1) != 1) _exit(127);
    RunChild(plan);
  }
  report_write.Reset();
  HostProcess process{.pid = pid, .pidfd = OpenPidfd(pid)};
  const Status written =
      WriteHostPid(options.directory, {.pid = pid, .start_ticks = ProcessStartTicks(pid)});
  if (!written.ok() || !process.pidfd.valid()) {
    gate_write.Reset();
    waitpid(pid, nullptr, 0);
    return written.ok() ? Status(Code::kInternal, "pidfd_open failed") : written;
  }
  const char go = 1;
  if (write(gate_write.get(), &go, 1) != 1) return ErrnoStatus(errno, "starting the job host");
  int error = 0;
  if (read(report_read.get(), &error, sizeof(error)) == sizeof(error)) {
    waitpid(pid, nullptr, 0);
    RemoveHostPid(options.directory);
    return ErrnoStatus(error, "executing " + options.program);
  }
  return process;
}

Result<HostProcess> FindHost(const std::string& directory) {
  const auto give_up = std::chrono::steady_clock::now() + kStartLimit;
  while (true) {
    const Result<HostPid> host = ReadHostPid(directory);
    if (!host.ok() && host.status().code() == Code::kNotFound) return host.status();
    const Status gone(Code::kUnavailable, "the job host of " + directory + " is gone");
    if (!host.ok()) return gone;
    HostProcess process{.pid = host->pid, .pidfd = OpenPidfd(host->pid)};
    // The descriptor first, then the check: it now stands for one process, whatever becomes of the number.
    const bool alive = process.pidfd.valid() && host->start_ticks != 0 &&
                       ProcessStartTicks(host->pid) == host->start_ticks;
    if (!alive && host->is_running) return gone;
    if (!alive) return Status(Code::kNotFound, "the job host of " + directory + " never ran");
    if (host->is_running || std::chrono::steady_clock::now() > give_up) return process;
    // Forked by a daemon that died before it let the child go on, which then ends, or right behind that.
    pollfd ended{.fd = process.pidfd.get(), .events = POLLIN, .revents = 0};
    ::poll(&ended, 1, kLookMilliseconds);
  }
}

}  // namespace oom
