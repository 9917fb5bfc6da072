// StopControl is what the daemon wants of a running job: to stop (and how), and checkpoints on
// request. The control server writes it, the threads of an attempt read it. A later stop may hurry
// an earlier one (NOW, another final state), never slow it down. Thread-safe.

#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/mutex.h"

namespace oom {

class StopControl {
 public:
  using Clock = std::chrono::steady_clock;

  struct Request {
    v1::JobState final_state = v1::JOB_STATE_CANCELLED;
    std::string reason;
    // False: end at once, without a checkpoint.
    bool checkpoint = true;
    // When a stop with a checkpoint becomes one without.
    Clock::time_point deadline = Clock::time_point::max();
  };

  void Stop(const internal::v1::Stop& stop);
  std::optional<Request> request() const;
  // The attempt must end now: without a checkpoint, or its grace is over.
  bool must_abort() const;
  // The checkpoint of the stop is durable: its grace no longer runs out.
  void CheckpointIsDurable();

  void AddCheckpoint(int64_t request);
  std::vector<int64_t> TakeCheckpoints();
  bool has_checkpoints() const;

  // Sleeps until a stop is requested. False when `timeout` passes first.
  bool WaitForStop(std::chrono::duration<double> timeout) const;

 private:
  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::optional<Request> request_ OOM_GUARDED_BY(mutex_);
  std::vector<int64_t> checkpoints_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
