#include "server/oomd/host_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/base/file.h"

namespace oom {
namespace {

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

unsigned long long ProcessStartTicks(pid_t pid) {
  const Result<std::string> stat = ReadFile("/proc/" + std::to_string(pid) + "/stat", 65536);
  if (!stat.ok()) return 0;
  // The name in parentheses may hold spaces and parentheses itself.
  const size_t close = stat->rfind(')');
  if (close == std::string::npos) return 0;
  unsigned long long ticks = 0;
  char state = 'X';
  const int read = std::sscanf(
      stat->c_str() + close + 1,
      " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
      &ticks);
  return read == 2 && state != 'Z' && state != 'X' ? ticks : 0;
}

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
  const Status written = WriteFileAtomically(
      options.directory + "/host.pid",
      std::to_string(pid) + " " + std::to_string(ProcessStartTicks(pid)) + "\n");
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
    unlink((options.directory + "/host.pid").c_str());
    return ErrnoStatus(error, "executing " + options.program);
  }
  return process;
}

void ForgetHost(const std::string& directory) { ::unlink((directory + "/host.pid").c_str()); }

Result<HostProcess> FindHost(const std::string& directory) {
  const Result<std::string> text = ReadFile(directory + "/host.pid", 4096);
  if (!text.ok()) return Status(Code::kNotFound, text.status().message());
  int pid = 0;
  unsigned long long ticks = 0;
  const Status gone(Code::kUnavailable, "the job host of " + directory + " is gone");
  if (std::sscanf(text->c_str(), "%d %llu", &pid, &ticks) != 2 || pid <= 0 || ticks == 0)
    return gone;
  HostProcess process{.pid = pid, .pidfd = OpenPidfd(pid)};
  // The descriptor first, then the check: it now stands for one process, whatever becomes of the
  // number.
  if (!process.pidfd.valid() || ProcessStartTicks(pid) != ticks) return gone;
  return process;
}

}  // namespace oom
