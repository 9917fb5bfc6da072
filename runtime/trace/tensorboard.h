// TensorboardWriter writes scalars as a TensorBoard event file: length-prefixed records with masked
// CRC32C, each a protobuf `Event` whose few fields are encoded here, so that no TensorFlow schema
// is needed. An attempt that goes on after step s starts a new file with a session mark at s + 1;
// TensorBoard then hides what earlier attempts wrote from there on. Thread-compatible.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

class TensorboardWriter {
 public:
  struct Options {
    std::string directory;        // Created if missing.
    int64_t completed_steps = 0;  // The run goes on after these.
    double unix_seconds = 0;      // Of the file's name and first events.
  };

  // Codes of ErrnoStatus.
  static Result<std::unique_ptr<TensorboardWriter>> Create(const Options& options);

  // One event with all of the step's values, by tag. Codes of ErrnoStatus.
  Status AddScalars(int64_t step, double unix_seconds,
                    const std::vector<std::pair<std::string, double>>& values);

  const std::string& path() const { return path_; }

 private:
  TensorboardWriter() = default;
  Status WriteRecord(std::string_view event);

  std::string path_;
  UniqueFd fd_;
};

// The record that frames `payload`.
std::string FrameRecord(std::string_view payload);

}  // namespace oom
