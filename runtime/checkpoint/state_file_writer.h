// StateFileWriter writes one file of known size in any order and from any thread, and knows the
// CRC32C of each piece when all is written. CRCs are taken from the caller's memory before the
// bytes go to disk, so that a fault on the way is seen when the file is verified. Large aligned
// ranges bypass the page cache. Write is thread-safe; the rest is not.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

class StateFileWriter {
 public:
  // Creates `path` and takes its space on the disk. Fails with kResourceExhausted (reason
  // STORAGE_FULL) or codes of ErrnoStatus; then there may be a partial file.
  static Result<std::unique_ptr<StateFileWriter>> Create(const std::string& path, int64_t bytes);

  // Fails with kInvalidArgument if some of the range was written before, or codes of Create.
  // REQUIRES: the range lies in the file.
  Status Write(int64_t offset_bytes, std::span<const std::byte> bytes);

  // Syncs and closes the file; the CRC of each piece. Fails with kFailedPrecondition if bytes are
  // missing.
  Result<std::vector<uint32_t>> Finish();

  int64_t bytes() const { return bytes_; }

 private:
  // A written range within one piece; ranges that touch are joined.
  struct Segment {
    int64_t end_bytes = 0;
    uint32_t crc = 0;
  };
  using Segments = std::map<int64_t, Segment>;  // By first byte in the piece.

  StateFileWriter(std::string path, int64_t bytes);
  Status WriteRange(int64_t offset_bytes, std::span<const std::byte> bytes);
  // One plain loop of pwrite on `fd`. Fails with the errno in *error_number.
  bool WriteFully(int fd, int64_t offset_bytes, std::span<const std::byte> bytes,
                  int* error_number);
  Status AddSegment(int64_t piece, int64_t begin_bytes, Segment segment);

  const std::string path_;
  const int64_t bytes_;
  UniqueFd fd_;
  UniqueFd direct_fd_;  // Invalid where the file system has no O_DIRECT.

  Mutex mutex_;
  std::vector<Segments> pieces_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
