// A daemon as a job host sees it: connects to host.sock, acknowledges transitions (or not), sends
// stops and checkpoint requests, remembers what it heard. One thread, the test's; it reads only
// inside its waits.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/ipc/channel.h"

namespace oom {

class FakeDaemon {
 public:
  explicit FakeDaemon(std::string socket_path) : socket_path_(std::move(socket_path)) {}

  bool acknowledge = true;

  // Waits until the socket takes a connection and hello was received. False after the deadline.
  bool Connect();
  void Disconnect() { channel_.reset(); }
  bool connected() const { return channel_ != nullptr; }

  void Stop(v1::JobState final_state, bool checkpoint);
  void RequestCheckpoint(int64_t request);

  // Reads frames until `done` is true. False after the deadline or when the host has gone.
  bool ReadUntil(const std::function<bool()>& done);
  bool WaitForState(v1::JobState state);
  // Until a final state has come (and was acknowledged). Nothing after the deadline.
  std::optional<internal::v1::Transition> WaitForEnd();

  const internal::v1::HostHello& hello() const { return hello_; }
  // By number, each once, whatever was repeated.
  const std::vector<internal::v1::Transition>& transitions() const { return transitions_; }
  const std::vector<internal::v1::CheckpointDone>& checkpoints() const { return checkpoints_; }
  const internal::v1::Progress& progress() const { return progress_; }
  int progress_count() const { return progress_count_; }
  int repeat_count() const { return repeat_count_; }
  // "STARTING RUNNING STOPPING SUCCEEDED"
  std::string States() const;

 private:
  bool ReadFrame(Channel::Deadline deadline);
  void Take(const internal::v1::HostFrame& frame);

  const std::string socket_path_;
  std::unique_ptr<Channel> channel_;
  internal::v1::HostHello hello_;
  internal::v1::Progress progress_;
  std::vector<internal::v1::Transition> transitions_;
  std::vector<internal::v1::CheckpointDone> checkpoints_;
  int progress_count_ = 0;
  int repeat_count_ = 0;
};

}  // namespace oom
