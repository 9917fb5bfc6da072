#include "runtime/ipc/channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/base/check.h"
#include "runtime/ipc/frame.h"

namespace oom {
namespace {

Status SocketStatus(int error_number, std::string_view what) {
  if (error_number == EPIPE || error_number == ECONNRESET || error_number == ENOTCONN) {
    return Status(Code::kUnavailable, std::string(what) + ": the peer is gone");
  }
  return ErrnoStatus(error_number, what);
}

// Takes ownership of every descriptor in the control data, wanted or not.
std::vector<UniqueFd> TakeDescriptors(struct msghdr* header) {
  std::vector<UniqueFd> taken;
  for (struct cmsghdr* control = CMSG_FIRSTHDR(header); control != nullptr;
       control = CMSG_NXTHDR(header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t index = 0; index < count; ++index) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + index * sizeof(int), sizeof(int));
      taken.emplace_back(fd);
    }
  }
  return taken;
}

}  // namespace

Result<std::pair<UniqueFd, UniqueFd>> Channel::MakePair() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus(errno, "cannot create a socket pair");
  }
  return std::pair<UniqueFd, UniqueFd>(UniqueFd(ends[0]), UniqueFd(ends[1]));
}

Status Channel::WaitFor(short events, Deadline deadline) const {
  while (true) {
    int timeout_ms = -1;
    if (deadline != kNoDeadline) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0) return Status(Code::kDeadlineExceeded, "the peer does not answer");
      timeout_ms = static_cast<int>(std::min<int64_t>(left.count(), 1 << 30));
    }
    struct pollfd entry = {.fd = socket_.get(), .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, timeout_ms);
    if (ready > 0) return Status::Ok();
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
  }
}

Status Channel::Send(const google::protobuf::MessageLite& message, std::span<const int> descriptors,
                     Deadline deadline) {
  OOM_CHECK(descriptors.size() <= kMaxFrameDescriptors);
  std::string payload;
  if (!message.SerializeToString(&payload) ||
      static_cast<int64_t>(payload.size()) > kFrameLimitBytes) {
    return Status(Code::kInvalidArgument, "a message of " + std::to_string(payload.size()) +
                                              " bytes is above the frame limit");
  }
  const std::string frame = EncodeFrame(payload);
  alignas(struct cmsghdr) char control[CMSG_SPACE(kMaxFrameDescriptors * sizeof(int))] = {};
  size_t sent_bytes = 0;
  while (sent_bytes < frame.size()) {
    struct iovec part = {.iov_base = const_cast<char*>(frame.data()) + sent_bytes,
                         .iov_len = frame.size() - sent_bytes};
    struct msghdr header {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (sent_bytes == 0 && !descriptors.empty()) {
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
      struct cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
      std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
    }
    const ssize_t count = ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent_bytes += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      OOM_RETURN_IF_ERROR(WaitFor(POLLOUT, deadline));
    } else if (errno != EINTR) {
      return SocketStatus(errno, "cannot send");
    }
  }
  return Status::Ok();
}

Status Channel::ReadExactly(char* out, size_t bytes, std::vector<UniqueFd>* descriptors,
                            Deadline deadline) {
  size_t read_bytes = 0;
  while (read_bytes < bytes) {
    alignas(struct cmsghdr) char control[CMSG_SPACE(kMaxFrameDescriptors * sizeof(int))] = {};
    struct iovec part = {.iov_base = out + read_bytes, .iov_len = bytes - read_bytes};
    struct msghdr header {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t count = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count > 0) {
      for (UniqueFd& fd : TakeDescriptors(&header)) descriptors->push_back(std::move(fd));
      if ((header.msg_flags & MSG_CTRUNC) != 0) {
        return Status(Code::kInvalidArgument,
                      "a frame came with more descriptors than can be taken");
      }
      read_bytes += static_cast<size_t>(count);
    } else if (count == 0) {
      return Status(Code::kUnavailable, "the peer has closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      OOM_RETURN_IF_ERROR(WaitFor(POLLIN, deadline));
    } else if (errno != EINTR) {
      return SocketStatus(errno, "cannot receive");
    }
  }
  return Status::Ok();
}

Status Channel::Receive(google::protobuf::MessageLite* message, std::vector<UniqueFd>* descriptors,
                        Deadline deadline) {
  std::vector<UniqueFd> received;  // Closed on every way out that does not hand them over.
  char header[kFrameHeaderBytes];
  OOM_RETURN_IF_ERROR(ReadExactly(header, sizeof(header), &received, deadline));
  const uint32_t length = DecodeFrameHeader(header);
  if (length > kFrameLimitBytes) {
    return Status(Code::kInvalidArgument,
                  "a frame of " + std::to_string(length) + " bytes is above the limit");
  }
  std::string payload(length, '\0');
  OOM_RETURN_IF_ERROR(ReadExactly(payload.data(), payload.size(), &received, deadline));
  if (!message->ParseFromString(payload)) {
    return Status(Code::kInvalidArgument,
                  "a frame does not parse as " + std::string(message->GetTypeName()));
  }
  if (descriptors != nullptr) {
    for (UniqueFd& fd : received) descriptors->push_back(std::move(fd));
  }
  return Status::Ok();
}

}  // namespace oom
