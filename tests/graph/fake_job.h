// FakeJob runs a whole job in one process: ranks of FakeWorker and a HostOptimizer on one control
// page, as the job host would. Single-threaded outside.

#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/optim/host_optimizer.h"
#include "tests/graph/fake_worker.h"
#include "tests/graph/reference_job.h"

namespace oom::testing {

class FakeJob {
 public:
  // `host` and `worker` are completed with what follows from the job.
  FakeJob(const TestJob& job, const PoolMap& pools, uint64_t seed, int64_t first_step,
          HostOptimizer::Options host, FakeWorker::Options worker);
  // Aborts if the job did not end, and joins.
  ~FakeJob();

  ControlPage& page() { return *page_; }
  HostOptimizer& optimizer() { return *optimizer_; }
  FakeWorker& worker(int rank) { return *workers_[static_cast<size_t>(rank)]; }

  // Starts the ranks on steps [first_step, last).
  void StartWorkers(int64_t last);
  // The rank's first failure, after its end.
  Status Join(int rank);
  // As engine rules, section 7, ask: the word, then the threads, then the waits.
  void Abort();
  // Where every word stands, for a message about a run that stood still.
  std::string Words() const;

 private:
  const TestJob& job_;
  const int64_t first_step_;
  std::unique_ptr<ControlPage> page_;
  std::unique_ptr<HostOptimizer> optimizer_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  std::vector<std::thread> threads_;
  std::vector<Status> results_;
};

}  // namespace oom::testing
