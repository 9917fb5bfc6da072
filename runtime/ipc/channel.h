// Channel sends and receives protobuf messages as frames over a connected Unix stream socket, with
// file descriptors beside them (SCM_RIGHTS). It blocks up to a deadline. The descriptors of a
// message travel with the first byte of its frame and are received close-on-exec. One thread may
// send while another receives; neither call is safe to share further. Owns the socket.

#pragma once

#include <google/protobuf/message_lite.h>

#include <chrono>
#include <span>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

// Descriptors that one frame may carry.
inline constexpr int kMaxFrameDescriptors = 64;

class Channel {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  static constexpr Deadline kNoDeadline = Deadline::max();

  // Two connected ends, both close-on-exec. Codes of ErrnoStatus.
  static Result<std::pair<UniqueFd, UniqueFd>> MakePair();

  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}

  // Fails with kUnavailable (the peer is gone), kDeadlineExceeded, kInvalidArgument (a message
  // above the frame limit), or a code of ErrnoStatus. After kDeadlineExceeded a frame may be cut:
  // the channel is unusable. The descriptors stay the caller's. REQUIRES: at most
  // kMaxFrameDescriptors.
  Status Send(const google::protobuf::MessageLite& message, std::span<const int> descriptors = {},
              Deadline deadline = kNoDeadline);

  // Fails as Send does; an end of stream, also inside a frame, is kUnavailable; a frame that does
  // not parse or is above the limit, or cut descriptors, kInvalidArgument. Descriptors that came
  // with the frame are appended to `descriptors`, or closed if it is null.
  Status Receive(google::protobuf::MessageLite* message,
                 std::vector<UniqueFd>* descriptors = nullptr, Deadline deadline = kNoDeadline);

  // For poll(): readable when a frame or an end of stream is there.
  int fd() const { return socket_.get(); }

 private:
  Status WaitFor(short events, Deadline deadline) const;
  Status ReadExactly(char* out, size_t bytes, std::vector<UniqueFd>* descriptors,
                     Deadline deadline);

  UniqueFd socket_;
};

}  // namespace oom
