#include "tests/jobhost/fake_daemon.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

namespace oom {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(60);

bool IsEnd(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED || state == v1::JOB_STATE_SUSPENDED;
}

}  // namespace

bool FakeDaemon::Connect() {
  const Clock::time_point deadline = Clock::now() + kPatience;
  struct sockaddr_un address {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket_path_.c_str(), sizeof(address.sun_path) - 1);
  while (Clock::now() < deadline) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), reinterpret_cast<struct sockaddr*>(&address), sizeof(address)) ==
        0) {
      channel_ = std::make_unique<Channel>(std::move(socket));
      internal::v1::HostFrame frame;
      if (!channel_->Receive(&frame, nullptr, deadline).ok() || !frame.has_hello()) return false;
      hello_ = frame.hello();
      return true;
    }
    ::usleep(2000);  // Until the next try of a condition that has a deadline.
  }
  return false;
}

void FakeDaemon::Stop(v1::JobState final_state, bool checkpoint) {
  internal::v1::DaemonFrame frame;
  frame.mutable_stop()->set_final_state(final_state);
  frame.mutable_stop()->set_checkpoint(checkpoint);
  frame.mutable_stop()->set_grace_seconds(60.0);
  frame.mutable_stop()->set_reason("USER_CANCEL");
  EXPECT_TRUE(channel_->Send(frame).ok());
}

void FakeDaemon::RequestCheckpoint(int64_t request) {
  internal::v1::DaemonFrame frame;
  frame.mutable_checkpoint()->set_request(request);
  EXPECT_TRUE(channel_->Send(frame).ok());
}

void FakeDaemon::Take(const internal::v1::HostFrame& frame) {
  if (frame.has_progress()) {
    progress_ = frame.progress();
    ++progress_count_;
  }
  if (frame.has_checkpoint_done()) checkpoints_.push_back(frame.checkpoint_done());
  if (!frame.has_transition()) return;
  const int64_t number = frame.transition().number();
  if (transitions_.empty() || number > transitions_.back().number()) {
    transitions_.push_back(frame.transition());
  } else {
    ++repeat_count_;
  }
  if (!acknowledge) return;
  internal::v1::DaemonFrame reply;
  reply.mutable_ack()->set_number(number);
  static_cast<void>(channel_->Send(reply));
}

bool FakeDaemon::ReadFrame(Channel::Deadline deadline) {
  internal::v1::HostFrame frame;
  if (!channel_ || !channel_->Receive(&frame, nullptr, deadline).ok()) return false;
  Take(frame);
  return true;
}

bool FakeDaemon::ReadUntil(const std::function<bool()>& done) {
  const Clock::time_point deadline = Clock::now() + kPatience;
  while (!done()) {
    if (!ReadFrame(deadline)) return false;
  }
  return true;
}

bool FakeDaemon::WaitForState(v1::JobState state) {
  return ReadUntil([&] { return !transitions_.empty() && transitions_.back().state() == state; });
}

std::optional<internal::v1::Transition> FakeDaemon::WaitForEnd() {
  if (!ReadUntil([&] { return !transitions_.empty() && IsEnd(transitions_.back().state()); })) {
    return std::nullopt;
  }
  return transitions_.back();
}

std::string FakeDaemon::States() const {
  std::string text;
  for (const internal::v1::Transition& transition : transitions_) {
    if (!text.empty()) text += " ";
    text += v1::JobState_Name(transition.state()).substr(std::strlen("JOB_STATE_"));
  }
  return text;
}

}  // namespace oom
