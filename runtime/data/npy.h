// NpyFile maps a numpy array file (.npy, format 1 or 2): one dimension, little-endian, of a wanted
// type. The header is checked strictly, the data must fill the file to its last byte. Read-only;
// thread-safe. Spans live as long as the object.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

struct NpyHeader {
  std::string descr;           // "<u4": as numpy writes it.
  std::vector<int64_t> shape;  // C order.
  int64_t element_bytes = 0;
  int64_t elements = 0;  // Product of shape.
  int64_t data_offset_bytes = 0;
};

// `prefix` is the start of the file, the whole header at least. Fails with kInvalidArgument;
// messages start with `path`.
Result<NpyHeader> ParseNpyHeader(std::string_view prefix, const std::string& path);

class NpyFile {
 public:
  // Fails with kNotFound, kPermissionDenied, or kInvalidArgument: not an npy file, another type
  // than one of `types`, not one-dimensional, data that is shorter or longer than the shape says.
  static Result<std::unique_ptr<NpyFile>> Open(const std::string& path,
                                               std::span<const std::string_view> types);
  ~NpyFile();
  NpyFile(const NpyFile&) = delete;
  NpyFile& operator=(const NpyFile&) = delete;

  int64_t elements() const { return header_.elements; }
  // REQUIRES: sizeof(T) is the size of an element. The data may be unaligned only if a foreign
  // writer made it so; Open refuses that.
  template <class T>
  std::span<const T> values() const {
    CheckElementBytes(sizeof(T));
    return {reinterpret_cast<const T*>(map_ + header_.data_offset_bytes),
            static_cast<size_t>(header_.elements)};
  }

 private:
  NpyFile() = default;
  void CheckElementBytes(size_t bytes) const;

  NpyHeader header_;
  const std::byte* map_ = nullptr;
  int64_t map_bytes_ = 0;
};

}  // namespace oom
