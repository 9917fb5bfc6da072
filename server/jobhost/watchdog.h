// Watchdog follows the workers of one attempt on its own thread: their frames, their ends (pidfd)
// and their heartbeats. At the first failure, or when the job must stop at once, it aborts the
// control page, so that every wait in every process ends (engine rules, section 7); what follows is
// the attempt's business. Public methods are thread-safe.

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/memory/control_page.h"
#include "server/jobhost/worker_process.h"

namespace oom {

class Watchdog {
 public:
  struct Options {
    ControlPage* page = nullptr;
    // Must outlive the watchdog; none may be reaped while it runs.
    std::vector<WorkerProcess*> workers;
    // A worker that has something to do and whose heartbeat does not move for that long is hung.
    std::chrono::duration<double> silence_limit{120.0};
    // Looked at on each turn: the job must end now.
    std::function<bool()> must_abort;
    // Looked at on each turn: the host itself holds the workers up (a snapshot waits for the disk).
    std::function<bool()> host_is_busy;
  };

  struct Failure {
    Status status;  // With its reason.
    int rank = -1;  // -1: not a worker's.
    bool hung = false;
  };

  explicit Watchdog(Options options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Waits until every worker is ready or one failed. On success: what each rank said.
  Result<std::vector<internal::v1::WorkerReady>> WaitReady();
  // From here on workers are to finish and end: being idle is being hung.
  void ExpectEnd();
  // Waits until every worker has said that it is done and has ended by itself, or one failed. On success: what each
  // rank said.
  Result<std::vector<internal::v1::WorkerDone>> WaitDone();

  // A failure that the host found itself: as if a worker had failed.
  void Fail(Status status);
  std::optional<Failure> failure() const;

 private:
  struct Rank {
    std::optional<internal::v1::WorkerReady> ready;
    std::optional<internal::v1::WorkerDone> done;
    bool exited = false;
    uint64_t heartbeat = 0;
    std::chrono::steady_clock::time_point moved_at;
  };

  void Run();
  void TakeFrame(int rank);
  void TakeExit(int rank);
  void CheckHeartbeats();
  bool HasWork(int rank, const Rank& state) const OOM_REQUIRES(mutex_);
  void FailRank(int rank, Status status, bool hung);

  const Options options_;
  UniqueFd end_event_;
  std::atomic<bool> expect_end_{false};

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Rank> ranks_ OOM_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ OOM_GUARDED_BY(mutex_);
  std::vector<char> stream_ended_;  // By rank; the watchdog thread's alone.

  std::thread thread_;
};

}  // namespace oom
