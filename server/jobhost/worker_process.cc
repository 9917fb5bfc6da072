#include "server/jobhost/worker_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

namespace oom {
namespace {

constexpr int kControlFd = 3;

int PidfdOpen(pid_t pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

struct ChildPlan {
  const char* program;
  char* const* arguments;
  int socket;
  int log;
  int null_input;
  int error_pipe;
  pid_t parent;
};

// Runs between fork and exec in a copy of a process with threads: async-signal-safe calls only.
[[noreturn]] void RunChild(const ChildPlan& plan) {
  const auto fail = [&plan] {
    const int error_number = errno;
    [[maybe_unused]] const ssize_t count =
        ::write(plan.error_pipe, &error_number, sizeof(error_number));
    ::_exit(127);
  };
  ::setpgid(0, 0);
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) fail();
  // The parent may have died before the line above.
  if (::getppid() != plan.parent) ::_exit(127);
  for (int number = 1; number < NSIG; ++number) ::signal(number, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (::dup2(plan.null_input, STDIN_FILENO) < 0) fail();
  if (::dup2(plan.log, STDOUT_FILENO) < 0 || ::dup2(plan.log, STDERR_FILENO) < 0) fail();
  if (::dup2(plan.socket, kControlFd) < 0) fail();
  // Ours are close-on-exec; what this process itself inherited may not be.
  ::syscall(SYS_close_range, kControlFd + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  ::execv(plan.program, plan.arguments);
  fail();
  ::_exit(127);
}

// The descriptor at or above 10, out of the way of the child's 0 to 3.
Result<UniqueFd> MoveHigh(int fd) {
  UniqueFd high(::fcntl(fd, F_DUPFD_CLOEXEC, 10));
  if (!high.valid()) return ErrnoStatus(errno, "cannot duplicate a descriptor");
  return high;
}

}  // namespace

std::string ProcessExit::Describe() const {
  if (signal != 0) {
    return "was killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
  }
  return "exited with code " + std::to_string(exit_code);
}

Result<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(const Options& options) {
  std::unique_ptr<WorkerProcess> worker(new WorkerProcess(options));
  OOM_ASSIGN_OR_RETURN(worker->log_, RankLog::Start(options.log));
  OOM_ASSIGN_OR_RETURN(auto sockets, Channel::MakePair());
  worker->channel_ = std::make_unique<Channel>(std::move(sockets.first));
  OOM_ASSIGN_OR_RETURN(const UniqueFd socket, MoveHigh(sockets.second.get()));
  OOM_ASSIGN_OR_RETURN(const UniqueFd log, MoveHigh(worker->log_->write_fd()));
  const UniqueFd null_open(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null_open.valid()) return ErrnoStatus(errno, "cannot open /dev/null");
  OOM_ASSIGN_OR_RETURN(const UniqueFd null_input, MoveHigh(null_open.get()));
  int pipe_ends[2] = {-1, -1};
  if (::pipe2(pipe_ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "cannot create a pipe");
  const UniqueFd error_read(pipe_ends[0]);
  UniqueFd error_write_low(pipe_ends[1]);
  OOM_ASSIGN_OR_RETURN(UniqueFd error_write, MoveHigh(error_write_low.get()));
  error_write_low.Reset();

  std::vector<std::string> words = {options.program, "--rank", std::to_string(options.rank),
                                    "--control-fd", std::to_string(kControlFd)};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const ChildPlan plan = {.program = options.program.c_str(),
                          .arguments = arguments.data(),
                          .socket = socket.get(),
                          .log = log.get(),
                          .null_input = null_input.get(),
                          .error_pipe = error_write.get(),
                          .parent = ::getpid()};
  const pid_t pid = ::fork();
  if (pid < 0) return ErrnoStatus(errno, "cannot fork a worker");
  if (pid == 0) RunChild(plan);
  worker->pid_ = pid;
  ::setpgid(pid, pid);  // Here too: whoever comes first.
  worker->pidfd_ = UniqueFd(PidfdOpen(pid));
  if (!worker->pidfd_.valid()) {
    const int error_number = errno;
    ::kill(pid, SIGKILL);
    ::waitpid(std::exchange(worker->pid_, -1), nullptr, 0);
    return ErrnoStatus(error_number, "cannot open a pidfd");
  }
  worker->log_->CloseWriter();
  error_write.Reset();
  int exec_error = 0;
  ssize_t count = 0;
  do {
    count = ::read(error_read.get(), &exec_error, sizeof(exec_error));
  } while (count < 0 && errno == EINTR);
  if (count == sizeof(exec_error)) {
    return ErrnoStatus(exec_error, "cannot run the worker program " + options.program);
  }
  return worker;
}

WorkerProcess::~WorkerProcess() {
  if (pid_ > 0) Kill();
}

std::optional<ProcessExit> WorkerProcess::Peek() const {
  siginfo_t info{};
  const auto type = static_cast<idtype_t>(3);  // P_PIDFD, which this C library may not name.
  if (::waitid(type, static_cast<id_t>(pidfd_.get()), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  if (info.si_code == CLD_EXITED) return ProcessExit{.exit_code = info.si_status};
  return ProcessExit{.signal = info.si_status};
}

std::optional<ProcessExit> WorkerProcess::Poll() { return WaitFor(std::chrono::milliseconds(0)); }

std::optional<ProcessExit> WorkerProcess::WaitFor(std::chrono::milliseconds timeout) {
  if (exit_) return exit_;
  struct pollfd entry = {.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  if (::poll(&entry, 1, static_cast<int>(timeout.count())) <= 0) return std::nullopt;
  // Seen without reaping first: while the leader is a zombie its group's number cannot be taken by
  // another.
  ::kill(-pid_, SIGKILL);
  int status = 0;
  if (::waitpid(pid_, &status, 0) != pid_) return std::nullopt;
  exit_ = ProcessExit{.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                      .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0};
  log_->Finish();
  return exit_;
}

void WorkerProcess::Signal(int signal_number) {
  if (!exit_) ::kill(-pid_, signal_number);
}

ProcessExit WorkerProcess::Kill() {
  if (exit_) return *exit_;
  ::kill(-pid_, SIGKILL);
  while (!WaitFor(std::chrono::milliseconds(1000))) {
  }
  return *exit_;
}

void ReapOrphans() {
  const pid_t self = ::getpid();
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream stat_file(entry.path() / "stat");
    std::string line;
    std::getline(stat_file, line);
    // "pid (name) state ppid": the name may hold anything, so the last parenthesis counts.
    const size_t end_of_name = line.rfind(')');
    if (end_of_name == std::string::npos || end_of_name + 4 >= line.size()) continue;
    if (std::atoi(line.c_str() + end_of_name + 4) != self) continue;
    const pid_t pid = std::atoi(name.c_str());
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
}

}  // namespace oom
