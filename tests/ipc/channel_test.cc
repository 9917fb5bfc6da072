#include "runtime/ipc/channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <thread>

#include "oom/internal/v1/control.pb.h"
#include "runtime/ipc/frame.h"

namespace oom {
namespace {

using internal::v1::WorkerFrame;

struct Ends {
  Ends() : Ends(Channel::MakePair().value()) {}
  explicit Ends(std::pair<UniqueFd, UniqueFd> pair)
      : left(std::move(pair.first)), right(std::move(pair.second)) {}
  Channel left;
  Channel right;
};

Channel::Deadline Soon(int milliseconds) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

WorkerFrame Failure(std::string message) {
  WorkerFrame frame;
  frame.mutable_failed()->set_message(std::move(message));
  return frame;
}

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 512; ++fd) count += ::fcntl(fd, F_GETFD) != -1;
  return count;
}

UniqueFd MemoryFile(int64_t bytes) {
  UniqueFd fd(::memfd_create("channel-test", MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(fd.get(), bytes), 0);
  return fd;
}

TEST(ChannelTest, MessagesArriveWholeAndInOrder) {
  Ends ends;
  // More bytes than a socket buffer holds, so that both sides really block.
  std::thread sender([&] {
    for (int index = 0; index < 20; ++index) {
      EXPECT_TRUE(ends.left.Send(Failure(std::string(300000, 'a' + index))).ok());
    }
  });
  for (int index = 0; index < 20; ++index) {
    WorkerFrame frame;
    ASSERT_TRUE(ends.right.Receive(&frame).ok());
    EXPECT_EQ(frame.failed().message(), std::string(300000, 'a' + index));
  }
  sender.join();
}

// Goal: descriptors come with their own frame, in order, close-on-exec, and none is left open.
TEST(ChannelTest, DescriptorsArriveWithTheirFrameAndAreClosedByTheirOwner) {
  const int open_before = OpenDescriptors();
  {
    Ends ends;
    const UniqueFd small = MemoryFile(100);
    const UniqueFd large = MemoryFile(20000);
    const int both[] = {small.get(), large.get()};
    ASSERT_TRUE(ends.left.Send(Failure("none")).ok());
    ASSERT_TRUE(ends.left.Send(Failure("two"), both).ok());
    ASSERT_TRUE(ends.left.Send(Failure("unwanted"), both).ok());
    std::vector<UniqueFd> received;
    WorkerFrame frame;
    ASSERT_TRUE(ends.right.Receive(&frame, &received).ok());
    EXPECT_TRUE(received.empty());
    ASSERT_TRUE(ends.right.Receive(&frame, &received).ok());
    ASSERT_EQ(received.size(), 2u);
    struct stat info {};
    ASSERT_EQ(::fstat(received[1].get(), &info), 0);
    EXPECT_EQ(info.st_size, 20000);
    EXPECT_NE(::fcntl(received[0].get(), F_GETFD) & FD_CLOEXEC, 0);
    ASSERT_TRUE(ends.right.Receive(&frame, nullptr).ok());
    EXPECT_EQ(frame.failed().message(), "unwanted");
  }
  EXPECT_EQ(OpenDescriptors(), open_before);
}

TEST(ChannelTest, AsManyDescriptorsAsAllowedFit) {
  Ends ends;
  const UniqueFd file = MemoryFile(1);
  const std::vector<int> many(kMaxFrameDescriptors, file.get());
  ASSERT_TRUE(ends.left.Send(Failure(""), many).ok());
  std::vector<UniqueFd> received;
  WorkerFrame frame;
  ASSERT_TRUE(ends.right.Receive(&frame, &received).ok());
  EXPECT_EQ(received.size(), many.size());
}

TEST(ChannelTest, AClosedPeerIsUnavailable) {
  Ends ends;
  { const Channel gone = std::move(ends.left); }
  WorkerFrame frame;
  EXPECT_EQ(ends.right.Receive(&frame).code(), Code::kUnavailable);
  EXPECT_EQ(ends.right.Send(Failure("x")).code(), Code::kUnavailable);
}

TEST(ChannelTest, APeerThatEndsInsideAFrameIsUnavailable) {
  const std::string bytes = EncodeFrame(Failure("cut").SerializeAsString());
  for (size_t cut = 1; cut < bytes.size(); ++cut) {
    Ends ends;
    ASSERT_EQ(::send(ends.left.fd(), bytes.data(), cut, 0), static_cast<ssize_t>(cut));
    { const Channel gone = std::move(ends.left); }
    WorkerFrame frame;
    EXPECT_EQ(ends.right.Receive(&frame).code(), Code::kUnavailable) << cut;
  }
}

TEST(ChannelTest, ASilentPeerAndAFullSocketMeetTheDeadline) {
  Ends ends;
  WorkerFrame frame;
  EXPECT_EQ(ends.right.Receive(&frame, nullptr, Soon(20)).code(), Code::kDeadlineExceeded);
  Status status;
  for (int index = 0; index < 100 && status.ok(); ++index) {
    status = ends.left.Send(Failure(std::string(1 << 20, 'x')), {}, Soon(20));
  }
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
}

TEST(ChannelTest, BytesThatAreNoMessageAndOversizedFramesAreRefused) {
  Ends ends;
  const std::string garbage = EncodeFrame("\xFF\xFF\xFF");
  ASSERT_EQ(::send(ends.left.fd(), garbage.data(), garbage.size(), 0),
            static_cast<ssize_t>(garbage.size()));
  WorkerFrame frame;
  EXPECT_EQ(ends.right.Receive(&frame).code(), Code::kInvalidArgument);
  ASSERT_EQ(::send(ends.left.fd(), "\xFF\xFF\xFF\x7F", 4, 0), 4);
  EXPECT_EQ(ends.right.Receive(&frame).code(), Code::kInvalidArgument);
  EXPECT_EQ(ends.left.Send(Failure(std::string(kFrameLimitBytes, 'x'))).code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace oom
