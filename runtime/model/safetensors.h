// SafetensorsFile maps one safetensors file: 8 bytes of header length, a JSON header, the tensors'
// bytes. The header is checked in full at Open: length at most 100 MB, no key twice, known types,
// shape times type equal to the range, ranges in the file, without overlap or hole, the last one
// ending the file. Every failure names the file and, where there is one, the tensor. Read-only;
// thread-safe. Spans live as long as the file object.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/model/tensor_type.h"

namespace oom {

inline constexpr int64_t kSafetensorsHeaderLimitBytes = 100'000'000;

struct SafetensorInfo {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  int64_t offset_bytes = 0;  // In the data section.
  int64_t bytes = 0;
  int64_t elements() const { return bytes / TensorTypeBytes(type); }
};

struct SafetensorsHeader {
  std::vector<SafetensorInfo> tensors;          // By offset.
  std::map<std::string, std::string> metadata;  // "__metadata__"
  int64_t data_bytes = 0;
};

// The JSON text of a header whose file has `data_bytes` after it. Fails with kInvalidArgument.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, int64_t data_bytes,
                                                 const std::string& path);

class SafetensorsFile {
 public:
  // Fails with kNotFound, kPermissionDenied, or kInvalidArgument (malformed or truncated).
  static Result<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  // The header as it stands in the file, padding included.
  std::string_view header_text() const;
  // nullptr if there is none.
  const SafetensorInfo* Find(std::string_view name) const;

  // The mapped bytes. Touching them after somebody has truncated the file raises SIGBUS; Read does
  // not.
  std::span<const std::byte> bytes(const SafetensorInfo& tensor) const;

  // Bytes from `offset_bytes` of the tensor on, by pread. REQUIRES: the range lies in the tensor.
  // Fails with kDataLoss if the file has become shorter or cannot be read.
  Status Read(const SafetensorInfo& tensor, int64_t offset_bytes, std::span<std::byte> out) const;

  // Elements from `first_element` on as FP32. REQUIRES: IsTrainableType(tensor.type). Codes of
  // Read.
  Status ReadFloats(const SafetensorInfo& tensor, int64_t first_element,
                    std::span<float> out) const;

 private:
  SafetensorsFile() = default;

  std::string path_;
  UniqueFd fd_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> by_name_;  // Keys point into header_.
  const std::byte* map_ = nullptr;
  int64_t map_bytes_ = 0;
  int64_t data_offset_bytes_ = 0;
};

// "[2, 3]"
std::string FormatShape(const std::vector<int64_t>& shape);

}  // namespace oom
