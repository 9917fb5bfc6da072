#include "tests/client/run_oom.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "runtime/base/check.h"
#include "runtime/base/clock.h"

extern char** environ;

namespace oom {
namespace {

void MakePipe(UniqueFd* read_end, UniqueFd* write_end) {
  int fds[2];
  OOM_CHECK(::pipe2(fds, O_CLOEXEC) == 0);
  *read_end = UniqueFd(fds[0]);
  *write_end = UniqueFd(fds[1]);
}

// This process's environment without what steers oom, and with `changes`.
std::vector<std::string> Environment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    if (name == "OOM_HOST" || name == "NO_COLOR" || changes.contains(name)) continue;
    out.push_back(text);
  }
  for (const auto& [name, value] : changes) out.push_back(name + "=" + value);
  return out;
}

}  // namespace

OomProcess::OomProcess(const std::vector<std::string>& arguments, const OomOptions& options)
    : options_(options), deadline_(MonotonicSeconds() + options.deadline_seconds) {
  // A program that does not read its input is seen by its exit code.
  ::signal(SIGPIPE, SIG_IGN);
  std::vector<std::string> words = {options.program.empty() ? OOM_PROGRAM : options.program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<std::string> variables = Environment(options.environment);
  std::vector<char*> envp;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);

  UniqueFd input_read, input_write, data_write, messages_write;
  MakePipe(&input_read, &input_write);
  if (options.terminal) {
    int master = -1;
    int slave = -1;
    winsize size{.ws_row = 24, .ws_col = 100};
    OOM_CHECK(::openpty(&master, &slave, nullptr, nullptr, &size) == 0);
    data_ = UniqueFd(master);
    data_write = UniqueFd(slave);
  } else {
    MakePipe(&data_, &data_write);
    MakePipe(&messages_, &messages_write);
  }
  const int error_fd = options.terminal ? data_write.get() : messages_write.get();
  pid_ = ::fork();
  OOM_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    ::dup2(input_read.get(), STDIN_FILENO);
    ::dup2(data_write.get(), STDOUT_FILENO);
    ::dup2(error_fd, STDERR_FILENO);
    if (!options.folder.empty() && ::chdir(options.folder.c_str()) != 0) _exit(126);
    ::execve(argv[0], argv.data(), envp.data());
    _exit(126);
  }
  size_t done = 0;
  while (done < options.input.size()) {
    const ssize_t written =
        ::write(input_write.get(), options.input.data() + done, options.input.size() - done);
    if (written <= 0) break;
    done += static_cast<size_t>(written);
  }
}

OomProcess::~OomProcess() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
}

bool OomProcess::ReadSome() {
  pollfd wanted[2] = {{.fd = data_.get(), .events = POLLIN},
                      {.fd = messages_.get(), .events = POLLIN}};
  if (!data_.valid() && !messages_.valid()) return false;
  const int left_ms = static_cast<int>((deadline_ - MonotonicSeconds()) * 1000);
  if (left_ms <= 0 || ::poll(wanted, 2, left_ms) <= 0) {
    ::kill(pid_, SIGKILL);
    data_.Reset();
    messages_.Reset();
    return false;
  }
  char buffer[4096];
  const auto read_from = [&](UniqueFd* fd, short events, std::string* text) {
    if (events == 0) return;
    const ssize_t got = ::read(fd->get(), buffer, sizeof(buffer));
    // A terminal whose last writer is gone says EIO.
    if (got <= 0) {
      fd->Reset();
    } else {
      text->append(buffer, static_cast<size_t>(got));
    }
  };
  read_from(&data_, wanted[0].revents, &result_.data);
  read_from(&messages_, wanted[1].revents, &result_.messages);
  return true;
}

bool OomProcess::WaitFor(const std::string& text) {
  while (result_.messages.find(text) == std::string::npos &&
         result_.data.find(text) == std::string::npos) {
    if (!ReadSome()) return false;
  }
  return true;
}

void OomProcess::Signal(int signal) { ::kill(pid_, signal); }

OomResult OomProcess::Finish() {
  while (ReadSome()) {
  }
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  result_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (options_.terminal) result_.messages = result_.data;
  return result_;
}

OomResult RunOom(const std::vector<std::string>& arguments, const OomOptions& options) {
  return OomProcess(arguments, options).Finish();
}

}  // namespace oom
