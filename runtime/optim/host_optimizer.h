// HostOptimizer is the "host optimizer" resource of the step graph: threads, pinned by NUMA node, that wait for
// gradient chunks to land, reduce them over the ranks, update the streamed chunks of their own node in place and
// publish the new versions. It also forms the gradient norm and the clip factor of a step, and frees
// backlog slots in FIFO order. One object per attempt.
// Start, FinishStep, Stop: one thread (the job host's training loop). Everything else is internal.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/base/status.h"
#include "runtime/memory/control_page.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/optim/adamw.h"
#include "runtime/optim/schedule.h"

namespace oom {

class HostOptimizer {
 public:
  struct Options {
    // All three must outlive the object.
    const SharedLayout* layout = nullptr;
    const PoolMap* pools = nullptr;
    ControlPage* page = nullptr;

    v1::UpdateMode update_mode = v1::UPDATE_MODE_OVERLAPPED;
    int accumulation = 1;
    AdamWHyperparameters hyper;
    Schedule schedule;
    double max_gradient_norm = 0.0;   // 0: no clipping. REQUIRES deferred mode otherwise.
    int64_t first_step = 0;           // Completed steps at the start.
    std::vector<int> threads_by_node; // Optimizer threads of each NUMA node.
    SimdLevel simd = SimdLevel::kScalar;
    bool device_produces = false;     // GPUs write gradient words: they cannot ring the bell.

    // Called once by each optimizer thread before it does anything: pins it to its node.
    std::function<void(int numa_node)> bind_thread;
    // Called before streamed chunk `chunk` takes the update of step `step`: a snapshot that has not saved it yet
    // copies it aside (engine rules, section 11). May block. Empty: no snapshots.
    std::function<void(int64_t chunk, int64_t step)> before_update;
    // Test and trace hook: a piece of chunk `chunk` was updated by a thread of `numa_node`.
    std::function<void(int numa_node, int64_t chunk, int64_t step, double start_seconds,
                       double end_seconds)> on_update;
  };

  struct StepOutcome {
    double gradient_norm = 0.0;
    double clip = 1.0;
    double loss_sum = 0.0;            // Over the ranks in rank order.
    int64_t valid_targets = 0;
    double auxiliary_loss = 0.0;
    double learning_rate = 0.0;
  };

  static Result<std::unique_ptr<HostOptimizer>> Start(const Options& options);
  ~HostOptimizer();

  // Runs the updates of step `step` (called for first_step, first_step + 1, ...) and returns when all of
  // them, resident chunks included, are done, or fails:
  //   kAborted             the page was aborted
  //   kFailedPrecondition  reason NON_FINITE_LOSS or NON_FINITE_GRADIENT (the unit is named); nothing of
  //                        the non-finite chunk was applied. The attempt is over.
  Result<StepOutcome> FinishStep(int64_t step);

  // Stops the threads at a chunk boundary and joins them. After Abort of the page, before anything else is
  // released (engine rules, section 7). Idempotent.
  void Stop();

  // Seconds that the node's threads have spent in updates and norms.
  double busy_seconds(int numa_node) const;
  // Memory traffic of the unit's updates so far.
  int64_t update_bytes(int64_t unit) const;

 private:
  struct Impl;
  explicit HostOptimizer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
