#include "runtime/ipc/frame.h"

#include "runtime/base/check.h"

namespace oom {

std::string EncodeFrame(std::string_view payload) {
  OOM_CHECK(static_cast<int64_t>(payload.size()) <= kFrameLimitBytes);
  const auto length = static_cast<uint32_t>(payload.size());
  std::string frame;
  frame.reserve(kFrameHeaderBytes + payload.size());
  for (int shift = 0; shift < 32; shift += 8) {
    frame.push_back(static_cast<char>((length >> shift) & 0xFF));
  }
  frame.append(payload);
  return frame;
}

uint32_t DecodeFrameHeader(const char* header) {
  uint32_t length = 0;
  for (int index = 0; index < kFrameHeaderBytes; ++index) {
    length |= static_cast<uint32_t>(static_cast<unsigned char>(header[index])) << (8 * index);
  }
  return length;
}

Status FrameDecoder::Append(std::string_view bytes) {
  if (refused_) return Status(Code::kInvalidArgument, "the frame stream is broken");
  // Old frames are dropped once they are at least half of the buffer: linear time over a stream.
  if (taken_bytes_ > 0 && taken_bytes_ * 2 >= buffer_.size()) {
    buffer_.erase(0, taken_bytes_);
    checked_bytes_ -= taken_bytes_;
    taken_bytes_ = 0;
  }
  buffer_.append(bytes);
  return CheckHeaders();
}

Status FrameDecoder::CheckHeaders() {
  while (checked_bytes_ + kFrameHeaderBytes <= buffer_.size()) {
    const uint32_t length = DecodeFrameHeader(buffer_.data() + checked_bytes_);
    if (length > kFrameLimitBytes) {
      refused_ = true;
      buffer_.resize(checked_bytes_);
      return Status(Code::kInvalidArgument, "a frame of " + std::to_string(length) +
                                                " bytes is above the limit of " +
                                                std::to_string(kFrameLimitBytes));
    }
    checked_bytes_ += kFrameHeaderBytes + length;
  }
  return Status::Ok();
}

std::optional<std::string> FrameDecoder::Next() {
  if (taken_bytes_ + kFrameHeaderBytes > buffer_.size()) return std::nullopt;
  const size_t length = DecodeFrameHeader(buffer_.data() + taken_bytes_);
  const size_t begin = taken_bytes_ + kFrameHeaderBytes;
  if (begin + length > buffer_.size()) return std::nullopt;
  taken_bytes_ = begin + length;
  return buffer_.substr(begin, length);
}

}  // namespace oom
