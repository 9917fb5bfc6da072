// StepTracer collects the host optimizer's spans of the traced steps, and merges them with the parts
// that the workers wrote into one Chrome trace, <output>/trace/steps.json. OnUpdate is thread-safe;
// the rest is one thread's.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "oom/v1/job.pb.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/trace/chrome_trace.h"

namespace oom {

class StepTracer {
 public:
  // `layout` must outlive the object. Parts of earlier attempts are removed.
  StepTracer(const v1::JobSpec& spec, const SharedLayout* layout);

  // Where the worker of `rank` writes its part; empty if nothing is traced.
  std::string PartPath(int rank) const;
  void OnUpdate(int numa_node, int64_t chunk, int64_t step, double start_seconds,
                double end_seconds);
  // The last traced step is the one that completed as that many steps were: every worker has written its part.
  bool EndsWith(int64_t completed_steps) const {
    return first_step_ < end_step_ && completed_steps == end_step_;
  }
  // When the traced steps are over, or the workers have ended. Fails with codes of ChromeTrace::Read and Write.
  Status Write();

 private:
  struct Span {
    std::thread::id thread;
    int numa_node = 0;
    int64_t chunk = 0;
    double start_seconds = 0.0;
    double end_seconds = 0.0;
  };

  const SharedLayout* const layout_;
  const std::string directory_;
  int64_t first_step_ = 0;  // From 0; steps [first, end) are traced.
  int64_t end_step_ = 0;

  Mutex mutex_;
  std::vector<Span> spans_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
