// LogReader walks the log files of a job ("<output>/logs/attempt-<A>/rank-<R>.log" and
// "jobhost.log") by attempt, then rank, and returns their lines with offsets that stay valid: files
// only grow. Opens regular files below the folder only, without following links. Not thread-safe.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

struct LogLine {
  int rank = 0;  // -1: the job host.
  int attempt = 0;
  int64_t offset_bytes = 0;  // Of the byte after the line.
  std::string line;
};

class LogReader {
 public:
  static constexpr int64_t kMaxLineBytes = 16384;

  struct Options {
    std::string directory;  // "<output>/logs".
    std::set<int> ranks;    // Empty: all.
    int64_t since_offset_bytes = 0;
    int64_t tail_lines = 0;  // Of each file that is there at the start; 0: everything.
  };
  explicit LogReader(Options options) : options_(std::move(options)) {}

  // The next complete line; nothing when there is none now. `flush` also gives a last line that has
  // no newline yet: for the end of a job. Fails with codes of ErrnoStatus.
  Result<std::optional<LogLine>> Next(bool flush);

 private:
  struct File {
    int rank = 0;
    int attempt = 0;
    UniqueFd fd;
    int64_t read_bytes = 0;  // Of the file; what is beyond line_end is in `buffer`.
    int64_t line_end = 0;    // Offset after the last line given out.
    std::string buffer;
    size_t searched = 0;
    bool cutting = false;  // Within the rest of a line that was cut.
  };
  Status Discover();
  Status Open(const std::string& path, int attempt, int rank);
  std::optional<LogLine> Take(File& file, bool flush);
  Status Fill(File& file, bool* grew);

  const Options options_;
  bool first_discovery_ = true;
  std::map<std::pair<int, int>, File> files_;  // By (attempt, rank).
};

}  // namespace oom
