// Worker trains one rank of a job on its device: builds the graphs from the plan, fills its resident chunks,
// follows the job host's grants step by step, and evaluates. It talks to the job host twice (ready, done or
// failed); everything between goes through the control page.
// One thread calls Create, then Run.

#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

class WorkerDevice;

class Worker {
 public:
  // `page_fd` and `pool_fds` came with `start`. Fills this rank's resident chunks: a step may be granted once every
  // rank is made. Fails with kInvalidArgument (reason INVALID_INPUT) or codes of
  // the files that it opens.
  static Result<std::unique_ptr<Worker>> Create(const internal::v1::WorkerStart& start,
                                                std::unique_ptr<WorkerDevice> device,
                                                UniqueFd page_fd, std::vector<UniqueFd> pool_fds);
  ~Worker();

  uint64_t graph_hash() const;
  int64_t device_bytes_planned() const;

  // Returns when the job host has ended the run. `on_failure` is called once, at once, from the thread that
  // failed: the job host must learn of it before anything waits for this rank. kAborted if the page was.
  Status Run(const std::function<void(const Status&)>& on_failure);

  internal::v1::WorkerDone Summary() const;

 private:
  struct Impl;
  explicit Worker(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
