// RankLog copies what a worker writes to stdout and stderr into the rank's log file. The worker is
// never held up: a full disk or a flood costs lines, which are counted, not time. Lines are cut at
// 16 KiB; at the size cap the file becomes "<path>.1" and a new one begins, so a rank takes at most
// twice the cap. Runs its own thread from Start until the pipe's last writer is gone, or Finish.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

inline constexpr int64_t kLogLineLimitBytes = 16 << 10;

class RankLog {
 public:
  struct Options {
    std::string path;
    int64_t cap_bytes = int64_t{64} << 20;
  };

  // Codes of ErrnoStatus.
  static Result<std::unique_ptr<RankLog>> Start(const Options& options);
  ~RankLog();

  // For the worker's stdout and stderr; -1 after CloseWriter.
  int write_fd() const { return write_end_.get(); }
  // Once the worker has its copies.
  void CloseWriter() { write_end_.Reset(); }

  // Takes what is in the pipe, ends the thread and syncs the file. Call when the worker is gone.
  void Finish();

 private:
  explicit RankLog(const Options& options) : options_(options) {}

  void Run();
  void Take(const char* bytes, int64_t count);
  void WriteLine();
  bool Write(const std::string& text);
  void Rotate();

  const Options options_;
  UniqueFd read_end_;
  UniqueFd write_end_;
  UniqueFd finish_event_;
  // Below: the thread's alone.
  UniqueFd file_;
  int64_t file_bytes_ = 0;
  std::string line_;
  int64_t cut_bytes_ = 0;  // Of the current line, beyond the limit.
  int64_t lost_line_count_ = 0;
  std::thread thread_;
};

}  // namespace oom
