// CudaFaults takes the errors of calls that have nobody to return a Status to: those of streams and
// events. A device that has failed answers every call with an error; the first one is told to a
// listener, and the streams run dry. Thread-safe.

#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"

namespace oom {

class CudaFaults {
 public:
  using Listener = std::function<void(const Status&)>;

  // Called once, on the thread that saw the failure; now, if there was one already.
  void Listen(Listener listener) OOM_EXCLUDES(mutex_);

  // Nothing for cudaSuccess, and nothing after the first failure. Aborts for a wrong call.
  void Note(cudaError_t error, const char* what) OOM_EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  Listener listener_ OOM_GUARDED_BY(mutex_);
  Status failure_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
