// NodeTrace keeps what ran when on this rank during the traced steps, and the device memory that was in use meanwhile, and
// writes it as a part of the job's Chrome trace: one row per resource, and a curve of memory. Thread-safe.

#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/graph/step_graph.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/trace/chrome_trace.h"
#include "worker/worker_device.h"

namespace oom {

class NodeTrace {
 public:
  struct Options {
    std::string path;            // Of the part; empty: nothing is kept.
    std::string process;         // "rank 0"
    int64_t first_step = 0;
    int64_t step_count = 0;
    const SharedLayout* layout;  // Names of units; must outlive the object.
  };
  explicit NodeTrace(const Options& options);

  bool Wants(int64_t step) const {
    return !options_.path.empty() && step >= options_.first_step &&
           step < options_.first_step + options_.step_count;
  }
  // The last wanted step.
  bool EndsWith(int64_t step) const {
    return Wants(step) && step + 1 == options_.first_step + options_.step_count;
  }
  // Seconds of steady_clock. Steps that are not wanted are passed over.
  void Add(const Node& node, int64_t step, double start_seconds, double end_seconds)
      OOM_EXCLUDES(mutex_);
  // Of the next compute node whose times come, in issue order. A device runs operators after they were issued, but in that
  // order, and gives out memory in it: so the curve has the times of the device.
  void AddMemoryUse(const MemoryUse& use) OOM_EXCLUDES(mutex_);
  // Codes of WriteFileAtomically.
  Status Write() OOM_EXCLUDES(mutex_);

 private:
  const Options options_;
  Mutex mutex_;
  ChromeTrace trace_ OOM_GUARDED_BY(mutex_);
  std::deque<MemoryUse> memory_uses_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
