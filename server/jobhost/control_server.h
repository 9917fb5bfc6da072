// ControlServer is the job host's end of its control socket (host.sock): it greets every daemon
// that connects with HostHello, repeats each transition until it is acknowledged, sends progress at
// most four times a second, and takes stop and checkpoint requests. One daemon at a time: a new
// connection replaces the old one. Runs its own thread; every public method is thread-safe and
// returns at once.

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/status.h"
#include "server/jobhost/transition_journal.h"

namespace oom {

class ControlServer {
 public:
  struct Options {
    std::string socket_path;
    internal::v1::HostHello hello;         // Its attempt and progress are kept up to date.
    TransitionJournal* journal = nullptr;  // Must outlive the server.
    std::chrono::milliseconds progress_interval{250};
    std::chrono::milliseconds repeat_interval{2000};
    // Called on the server's thread; must not block.
    std::function<void(const internal::v1::Stop&)> on_stop;
    std::function<void(const internal::v1::CheckpointRequest&)> on_checkpoint;
    // The journal cannot be rewritten after an acknowledgement, and the like.
    std::function<void(const Status&)> on_trouble;
    // No daemon is connected since `absence_limit`, after one was. Zero: never called.
    std::chrono::milliseconds absence_limit{0};
    std::function<void()> on_absence;
    // The process was asked to end (SIGTERM).
    std::function<void()> on_terminate;
  };

  // Replaces a socket that a dead host left; mode 0600. Codes of ErrnoStatus; kInvalidArgument if
  // the path is longer than a Unix socket's may be.
  static Result<std::unique_ptr<ControlServer>> Start(Options options);
  // Closes the connection and removes the socket.
  ~ControlServer();
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;

  // After TransitionJournal::Append: sends what is pending.
  void TransitionsChanged();
  void SetAttempt(int attempt);
  void SetProgress(const internal::v1::Progress& progress);
  void CheckpointDone(const internal::v1::CheckpointDone& done);

  // Waits until every transition is acknowledged. False when `timeout` passes first.
  bool WaitAcknowledged(std::chrono::milliseconds timeout) const;

 private:
  class Impl;
  explicit ControlServer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
