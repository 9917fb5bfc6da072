// Attempt is one try to run the job from a starting point: a new control page, workers, state in
// the pools, the training loop, and the way out. Whatever happens, on return no worker lives, every
// thread of the attempt has ended and no descriptor of it is open. Run is called once, by the
// process's main thread (workers die with the thread that started them).

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "runtime/base/status.h"
#include "server/jobhost/checkpointer.h"
#include "server/jobhost/job_context.h"
#include "server/jobhost/job_status.h"
#include "server/jobhost/output_directory.h"
#include "server/jobhost/step_tracer.h"
#include "server/jobhost/stop_control.h"
#include "server/jobhost/training_loop.h"
#include "server/jobhost/watchdog.h"
#include "server/jobhost/worker_process.h"

namespace oom {

class Attempt {
 public:
  struct Options {
    const JobContext* context = nullptr;
    const OutputDirectory* output = nullptr;
    StopControl* stop = nullptr;
    JobStatus* status = nullptr;
    int number = 1;
    StartingPoint start;
    bool pools_are_new = false;
    std::chrono::duration<double> worker_silence_limit{120.0};
    int64_t log_cap_bytes = int64_t{64} << 20;
    // On the calling thread: all workers are ready; the end was decided.
    std::function<void()> on_running;
    std::function<void()> on_ending;
    // On any thread: answers to the daemon's checkpoint requests.
    std::function<void(const internal::v1::CheckpointDone&)> on_checkpoint;
  };

  struct Outcome {
    // OK: ended as decided (all steps, or a stop with a checkpoint). kCancelled: stopped at once.
    // Else the failure, with its reason.
    Status status;
    int64_t completed_steps = 0;
    std::string failed_log_path;
  };

  explicit Attempt(const Options& options);
  ~Attempt();

  Outcome Run();

 private:
  Status Prepare();
  Status StartWorkers();
  Status SendStart(WorkerProcess* worker);
  Status Load();
  Status CompareGraphs();
  Result<int64_t> Train();
  Status FinishWorkers();
  void EndWorkers();
  Outcome Describe(const Status& status);
  void OnCheckpoint(const Checkpointer::Outcome& outcome);
  void AnswerRequests(const std::vector<int64_t>& requests, const Checkpointer::Outcome& outcome);
  void OnStep(const StepReport& report, const TrainingLoop::StepCosts& costs);
  int64_t HostBytesPeak();

  const Options options_;
  int64_t completed_steps_ = 0;
  double busy_seconds_before_ = 0.0;  // Of the optimizer, in earlier attempts.
  int64_t host_bytes_peak_ = 0;
  std::chrono::steady_clock::time_point host_bytes_due_;

  Mutex mutex_;
  std::vector<int64_t> requests_
      OOM_GUARDED_BY(mutex_);  // Waiting for the snapshot of the last cut.
  Checkpointer::Outcome last_checkpoint_ OOM_GUARDED_BY(mutex_);

  // In the order of the way out, reversed: the watchdog ends first, the page goes last.
  std::unique_ptr<ControlPage> page_;
  std::vector<std::unique_ptr<WorkerProcess>> workers_;
  StepTracer tracer_;
  std::unique_ptr<StepReporter> reporter_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::unique_ptr<HostOptimizer> optimizer_;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace oom
