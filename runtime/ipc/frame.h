// Frames of the control sockets: a 4-byte little-endian length, then that many bytes of one
// protobuf message of proto/oom/internal/v1/control.proto. A length above kFrameLimitBytes is
// refused before a byte of it is stored. FrameDecoder takes a byte stream cut anywhere; the peer's
// bytes are untrusted. Values; not thread-safe.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/base/status.h"

namespace oom {

inline constexpr int64_t kFrameLimitBytes = int64_t{4} << 20;
inline constexpr int64_t kFrameHeaderBytes = 4;

// REQUIRES: payload.size() <= kFrameLimitBytes.
std::string EncodeFrame(std::string_view payload);

// The payload length that a header announces. REQUIRES: kFrameHeaderBytes readable bytes.
uint32_t DecodeFrameHeader(const char* header);

class FrameDecoder {
 public:
  // Takes the next bytes of the stream. Fails with kInvalidArgument at the first header above the
  // limit; from then on every call fails, and Next() yields only the frames before it.
  Status Append(std::string_view bytes);

  // The next complete payload, or nothing until more bytes have come.
  std::optional<std::string> Next();

  // Bytes of frames that are not complete or not taken yet.
  int64_t buffered_bytes() const { return static_cast<int64_t>(buffer_.size() - taken_bytes_); }

 private:
  Status CheckHeaders();

  std::string buffer_;
  size_t taken_bytes_ = 0;    // Of buffer_: already handed out.
  size_t checked_bytes_ = 0;  // Of buffer_: where the first header that is not checked begins.
  bool refused_ = false;
};

}  // namespace oom
