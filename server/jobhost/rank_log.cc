#include "server/jobhost/rank_log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace oom {

Result<std::unique_ptr<RankLog>> RankLog::Start(const Options& options) {
  std::unique_ptr<RankLog> log(new RankLog(options));
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "cannot create a log pipe");
  log->read_end_ = UniqueFd(ends[0]);
  log->write_end_ = UniqueFd(ends[1]);
  if (::fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0) return ErrnoStatus(errno, "log pipe");
  log->finish_event_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!log->finish_event_.valid()) return ErrnoStatus(errno, "cannot create a log event");
  log->file_ = UniqueFd(
      ::open(options.path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0640));
  if (!log->file_.valid()) return ErrnoStatus(errno, "cannot open " + options.path);
  struct stat info {};
  if (::fstat(log->file_.get(), &info) == 0) log->file_bytes_ = info.st_size;
  log->thread_ = std::thread([raw = log.get()] { raw->Run(); });
  return log;
}

RankLog::~RankLog() { Finish(); }

void RankLog::Finish() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t count = ::write(finish_event_.get(), &one, sizeof(one));
  thread_.join();
}

void RankLog::Run() {
  std::string buffer(64 << 10, '\0');
  bool finishing = false;
  while (true) {
    const ssize_t count = ::read(read_end_.get(), buffer.data(), buffer.size());
    if (count > 0) {
      Take(buffer.data(), count);
      continue;
    }
    if (count == 0 || finishing || (errno != EAGAIN && errno != EINTR)) break;
    struct pollfd entries[2] = {{.fd = read_end_.get(), .events = POLLIN, .revents = 0},
                                {.fd = finish_event_.get(), .events = POLLIN, .revents = 0}};
    ::poll(entries, 2, -1);
    finishing = (entries[1].revents & POLLIN) != 0;
  }
  if (!line_.empty()) WriteLine();
  if (lost_line_count_ > 0) {
    Write("[oom] " + std::to_string(lost_line_count_) + " lines were lost\n");
  }
  if (file_.valid()) ::fdatasync(file_.get());
}

void RankLog::Take(const char* bytes, int64_t count) {
  while (count > 0) {
    const auto* newline = static_cast<const char*>(std::memchr(bytes, '\n', count));
    const int64_t part = newline == nullptr ? count : newline - bytes;
    const int64_t room = kLogLineLimitBytes - static_cast<int64_t>(line_.size());
    const int64_t kept = part < room ? part : room;
    line_.append(bytes, kept);
    cut_bytes_ += part - kept;
    bytes += part;
    count -= part;
    if (newline != nullptr) {
      WriteLine();
      ++bytes;
      --count;
    }
  }
}

void RankLog::WriteLine() {
  line_.push_back('\n');
  if (!Write(line_)) ++lost_line_count_;
  line_.clear();
  if (cut_bytes_ > 0) {
    Write("[oom] the line above was cut: " + std::to_string(cut_bytes_) + " bytes more\n");
    cut_bytes_ = 0;
  }
}

bool RankLog::Write(const std::string& text) {
  if (file_bytes_ > 0 && file_bytes_ + static_cast<int64_t>(text.size()) > options_.cap_bytes) {
    Rotate();
  }
  if (!file_.valid()) return false;
  const ssize_t count = ::write(file_.get(), text.data(), text.size());
  if (count > 0) file_bytes_ += count;
  return count == static_cast<ssize_t>(text.size());
}

void RankLog::Rotate() {
  std::rename(options_.path.c_str(), (options_.path + ".1").c_str());
  file_ = UniqueFd(::open(options_.path.c_str(),
                          O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0640));
  file_bytes_ = 0;
}

}  // namespace oom
