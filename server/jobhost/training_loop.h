// TrainingLoop drives one attempt's steps from the job host's side: it grants steps to the workers
// (at most two beyond the completed one), finishes each with the host optimizer, decides where
// checkpoints cut, ends the run (all steps done, or a stop with a checkpoint) and reports every
// step. What it grants it never takes back: a stop ends after the steps that were granted, or one
// more, which a checkpoint needs. One thread.

#pragma once

#include <functional>
#include <optional>
#include <string>

#include "runtime/base/status.h"
#include "runtime/memory/control_page.h"
#include "runtime/optim/host_optimizer.h"
#include "server/jobhost/checkpointer.h"
#include "server/jobhost/job_context.h"
#include "server/jobhost/step_reporter.h"
#include "server/jobhost/stop_control.h"

namespace oom {

class TrainingLoop {
 public:
  // Sums of the workers' records of one step, beside the report.
  struct StepCosts {
    int64_t host_to_device_bytes = 0;
    int64_t device_to_host_bytes = 0;
    int64_t boundary_bytes = 0;
    int64_t collective_bytes = 0;
  };

  struct Options {
    const JobContext* context = nullptr;
    ControlPage* page = nullptr;
    HostOptimizer* optimizer = nullptr;
    Checkpointer* checkpointer = nullptr;
    StepReporter* reporter = nullptr;
    StopControl* stop = nullptr;
    int64_t first_step = 0;  // Completed steps at the start.
    std::function<int64_t()> host_bytes_peak;
    std::function<void(const StepReport&, const StepCosts&)> on_step;
    // The end is decided, by a stop or because all steps are done: workers will end.
    std::function<void()> on_ending;
    // A cut was made that these requests of the daemon asked for.
    std::function<void(int64_t step, const std::vector<int64_t>& requests)> on_cut;
  };

  explicit TrainingLoop(const Options& options) : options_(options) {}

  // Returns the steps that were completed in the end, or why the attempt failed: codes of
  // HostOptimizer::FinishStep, or of the step log.
  Result<int64_t> Run();

 private:
  void Grant();
  bool CutIsDue(int64_t steps) const;
  bool TakeCut(int64_t steps);
  void BeginSnapshotIfDue();
  Status ReportStep(const HostOptimizer::StepOutcome& outcome);
  Status WaitForRecords(int64_t step) const;

  const Options options_;
  int64_t completed_ = 0;
  int64_t granted_ = 0;      // page.step_limit
  int64_t end_ = 0;          // Steps after which the run ends.
  int64_t cut_ = 0;          // The last cut that was announced to the workers.
  int64_t snapshot_at_ = 0;  // The last cut whose snapshot was begun.
  bool stop_seen_ = false;
  bool ending_ = false;
};

}  // namespace oom
