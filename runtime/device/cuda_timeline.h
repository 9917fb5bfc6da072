// CudaTimeline tells when work on the device was complete: streams record marks around work, and a thread of its own
// waits for them in the order in which they were handed over, and calls back. Nothing that enqueues work ever waits
// for the device. Thread-safe.

#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/device/cuda_faults.h"

namespace oom {

class CudaTimeline {
 public:
  // Seconds of steady_clock.
  using Done = std::function<void(double start_seconds, double end_seconds)>;

  // Of the current device. `faults` must outlive it.
  explicit CudaTimeline(CudaFaults* faults);
  // Calls back everything that was handed over.
  ~CudaTimeline();
  CudaTimeline(const CudaTimeline&) = delete;
  CudaTimeline& operator=(const CudaTimeline&) = delete;

  // The device's time when it comes to this point of the stream.
  cudaEvent_t Mark(cudaStream_t stream) OOM_EXCLUDES(mutex_);
  // Calls `done` once the work between the two marks is complete, or the device has failed. Takes
  // the marks.
  void HandOver(cudaEvent_t start, cudaEvent_t end, Done done) OOM_EXCLUDES(mutex_);
  // Returns when everything that was handed over so far was called back. Not from a callback.
  void Flush() OOM_EXCLUDES(mutex_);

 private:
  struct Span {
    cudaEvent_t start;
    cudaEvent_t end;
    Done done;
  };

  void Run(int device);
  double Seconds(cudaEvent_t mark) const;

  CudaFaults* const faults_;
  // Of the thread: a mark whose host time is known.
  cudaEvent_t base_ = nullptr;
  double base_seconds_ = 0.0;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Span> spans_ OOM_GUARDED_BY(mutex_);
  std::vector<cudaEvent_t> free_ OOM_GUARDED_BY(mutex_);
  bool closed_ OOM_GUARDED_BY(mutex_) = false;
  bool is_calling_back_ OOM_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace oom
