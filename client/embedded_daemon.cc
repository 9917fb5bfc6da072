#include "client/embedded_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <vector>

#include "client/temporary_folder.h"
#include "runtime/base/file.h"
#include "runtime/base/unique_fd.h"

namespace oom {
namespace {

// An ephemeral oomd writes a checkpoint first.
constexpr int kStopMilliseconds = 180 * 1000;
constexpr size_t kLogTailBytes = 2000;

// In the child, between fork and exec: only async-signal-safe calls.
[[noreturn]] void ExecDaemon(char* const* arguments, int log_fd, pid_t parent) {
  // The terminal's Ctrl-C is for oom alone; it decides what happens to the job.
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(log_fd, STDOUT_FILENO);
  dup2(log_fd, STDERR_FILENO);
  execv(arguments[0], arguments);
  _exit(127);
}

}  // namespace

Result<std::string> PathBeside(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return ErrnoStatus(error.value(), "cannot find this program");
  return std::string(self.parent_path() / name);
}

Result<std::string> ProgramBeside(const std::string& name) {
  OOM_ASSIGN_OR_RETURN(const std::string path, PathBeside(name));
  if (::access(path.c_str(), X_OK) != 0) {
    return Status(Code::kNotFound, "there is no program " + path + " beside oom");
  }
  return path;
}

Result<std::unique_ptr<EmbeddedDaemon>> EmbeddedDaemon::Start(const std::string& state_dir) {
  OOM_ASSIGN_OR_RETURN(const std::string program, ProgramBeside("oomd"));
  auto daemon = std::unique_ptr<EmbeddedDaemon>(new EmbeddedDaemon());
  if (state_dir.empty()) {
    OOM_ASSIGN_OR_RETURN(daemon->folder_, MakeTemporaryFolder());
    daemon->folder_is_temporary_ = true;
  } else {
    daemon->folder_ = std::filesystem::absolute(state_dir).lexically_normal().string();
    OOM_RETURN_IF_ERROR(MakeDirectories(daemon->folder_));
  }
  daemon->socket_path_ = daemon->folder_ + "/oomd.sock";
  daemon->log_path_ = daemon->folder_ + "/oomd.log";
  const UniqueFd log(
      ::open(daemon->log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!log.valid()) return ErrnoStatus(errno, "cannot write " + daemon->log_path_);
  std::vector<std::string> words = {program, "--foreground", "--ephemeral",
                                    "--state-dir=" + daemon->folder_,
                                    "--socket=" + daemon->socket_path_};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  daemon->pid_ = ::fork();
  if (daemon->pid_ < 0) return ErrnoStatus(errno, "cannot start " + program);
  if (daemon->pid_ == 0) ExecDaemon(arguments.data(), log.get(), parent);
  return daemon;
}

Status EmbeddedDaemon::CheckAlive() {
  int wait_status = 0;
  if (pid_ > 0 && ::waitpid(pid_, &wait_status, WNOHANG) == 0) return Status::Ok();
  pid_ = -1;
  const Result<std::string> log = ReadFile(log_path_);
  std::string end = log.ok() ? *log : "";
  if (end.size() > kLogTailBytes) end.erase(0, end.size() - kLogTailBytes);
  return Status(Code::kUnavailable, "the private oomd ended:\n" + end);
}

EmbeddedDaemon::~EmbeddedDaemon() {
  if (pid_ > 0) {
    const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    ::kill(pid_, SIGTERM);
    pollfd wanted{.fd = process.get(), .events = POLLIN};
    int ready = 0;
    do {
      ready = ::poll(&wanted, 1, kStopMilliseconds);
    } while (ready < 0 && errno == EINTR);
    if (ready <= 0) ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (folder_is_temporary_) {
    std::error_code ignored;  // A folder that cannot be removed is left to the system's cleaning.
    std::filesystem::remove_all(folder_, ignored);
  }
}

}  // namespace oom
