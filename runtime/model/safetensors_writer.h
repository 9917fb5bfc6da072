// SafetensorsWriter writes one safetensors file. The header comes first, from the list of all
// tensors; then their bytes, either in order (Append) or anywhere in the preallocated file
// (WriteAt). Finish checks that every byte was written and syncs. A writer that is destroyed before
// leaves a partial file; the caller writes into a temporary directory. WriteAt is thread-safe on
// disjoint ranges; the rest is not.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/model/safetensors.h"

namespace oom {

struct SafetensorEntry {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
};

class SafetensorsWriter {
 public:
  struct Options {
    std::string path;
    std::vector<SafetensorEntry> tensors;         // In the order of their bytes.
    std::map<std::string, std::string> metadata;  // {"format": "pt"} is what transformers expects.
    // Takes the file's space at Create, so that a full disk is an error before any work is done.
    // WriteAt needs it.
    bool preallocate = false;
  };

  // Codes of ErrnoStatus; kResourceExhausted when the disk is full. REQUIRES: names differ.
  static Result<std::unique_ptr<SafetensorsWriter>> Create(const Options& options);
  // The same layout and, byte for byte, the same header as an existing file.
  static Result<std::unique_ptr<SafetensorsWriter>> CreateLike(const std::string& path,
                                                               const SafetensorsFile& model);

  // Position of the bytes of tensor `index` in the data section, and how many there are.
  int64_t tensor_offset_bytes(size_t index) const { return offsets_bytes_[index]; }
  int64_t tensor_bytes(size_t index) const {
    return offsets_bytes_[index + 1] - offsets_bytes_[index];
  }
  int64_t data_bytes() const { return offsets_bytes_.back(); }

  // The next bytes of the data section. REQUIRES: they fit.
  Status Append(std::span<const std::byte> bytes);
  // Bytes of tensor `index` from `offset_bytes` on. REQUIRES: they fit, each byte is written once.
  Status WriteAt(size_t index, int64_t offset_bytes, std::span<const std::byte> bytes);
  // REQUIRES: every byte was written.
  Status Finish();

 private:
  SafetensorsWriter() = default;
  static Result<std::unique_ptr<SafetensorsWriter>> Start(const std::string& path,
                                                          std::string_view header,
                                                          std::vector<int64_t> offsets_bytes,
                                                          bool preallocate);
  Status WriteBytes(int64_t file_offset_bytes, std::span<const std::byte> bytes);

  std::string path_;
  UniqueFd fd_;
  std::vector<int64_t> offsets_bytes_;  // Of each tensor in the data section, then the end.
  int64_t data_offset_bytes_ = 0;
  int64_t appended_bytes_ = 0;
  std::atomic<int64_t> written_bytes_{0};
};

// The index of a sharded model: file by tensor name. Written atomically. Codes of ErrnoStatus.
Status WriteSafetensorsIndex(const std::string& path,
                             const std::map<std::string, std::string>& file_by_tensor,
                             int64_t total_bytes, int64_t total_parameters);

// ErrnoStatus, but EFBIG is kResourceExhausted like ENOSPC. For whoever writes large files.
Status WriteErrnoStatus(int error_number, std::string_view what);

}  // namespace oom
