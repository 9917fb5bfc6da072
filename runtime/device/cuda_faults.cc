#include "runtime/device/cuda_faults.h"

#include <utility>

#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_error.h"

namespace oom {

void CudaFaults::Listen(Listener listener) {
  Status failure;
  {
    MutexLock lock(mutex_);
    listener_ = listener;
    failure = failure_;
  }
  if (!failure.ok()) listener(failure);
}

void CudaFaults::Note(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  Listener listener;
  Status failure;
  {
    MutexLock lock(mutex_);
    // What comes after it is its consequence.
    if (!failure_.ok()) return;
    OOM_CHECK_MSG(!IsWrongCall(error), cudaGetErrorString(error));
    failure = failure_ = CudaStatus(error, what);
    listener = listener_;
  }
  if (listener) listener(failure);
}

}  // namespace oom
