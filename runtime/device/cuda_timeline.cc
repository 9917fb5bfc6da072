#include "runtime/device/cuda_timeline.h"

#include <pthread.h>

#include <utility>

#include "runtime/base/clock.h"
#include "runtime/device/cuda_check.h"

namespace oom {

CudaTimeline::CudaTimeline(CudaFaults* faults) : faults_(faults) {
  int device = 0;
  OOM_CUDA_CHECK(cudaGetDevice(&device));
  thread_ = std::thread([this, device] { Run(device); });
}

CudaTimeline::~CudaTimeline() {
  {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  MutexLock lock(mutex_);
  for (const cudaEvent_t event : free_) static_cast<void>(cudaEventDestroy(event));
  if (base_ != nullptr) static_cast<void>(cudaEventDestroy(base_));
}

cudaEvent_t CudaTimeline::Mark(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  {
    MutexLock lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  // The waiting thread sleeps: it must not take a core from the optimizer.
  if (event == nullptr) {
    faults_->Note(cudaEventCreateWithFlags(&event, cudaEventBlockingSync), "a mark");
  }
  faults_->Note(cudaEventRecord(event, stream), "a mark of a stream");
  return event;
}

void CudaTimeline::HandOver(cudaEvent_t start, cudaEvent_t end, Done done) {
  MutexLock lock(mutex_);
  spans_.push_back({.start = start, .end = end, .done = std::move(done)});
  changed_.NotifyAll();
}

void CudaTimeline::Flush() {
  MutexLock lock(mutex_);
  while (!spans_.empty() || is_calling_back_) changed_.Wait(mutex_);
}

double CudaTimeline::Seconds(cudaEvent_t mark) const {
  float milliseconds = 0.0f;
  faults_->Note(cudaEventElapsedTime(&milliseconds, base_, mark), "the time between two marks");
  return base_seconds_ + static_cast<double>(milliseconds) * 1e-3;
}

void CudaTimeline::Run(int device) {
  ::pthread_setname_np(::pthread_self(), "timeline");
  OOM_CUDA_CHECK(cudaSetDevice(device));
  while (true) {
    Span span;
    {
      MutexLock lock(mutex_);
      while (spans_.empty() && !closed_) changed_.Wait(mutex_);
      if (spans_.empty()) return;
      span = std::move(spans_.front());
      spans_.pop_front();
      is_calling_back_ = true;
    }
    // A device that has failed completes nothing.
    const cudaError_t error = cudaEventSynchronize(span.end);
    faults_->Note(error, "work on the GPU");
    const bool complete = error == cudaSuccess;
    const double now = MonotonicSeconds();
    double start = now, end = now;
    if (complete && base_ != nullptr) {
      start = Seconds(span.start);
      end = Seconds(span.end);
    }
    span.done(start, end);
    span.done = nullptr;
    MutexLock lock(mutex_);
    is_calling_back_ = false;
    changed_.NotifyAll();
    free_.push_back(span.start);
    if (!complete) {
      free_.push_back(span.end);
      continue;
    }
    // The two clocks drift apart: measure from a recent mark, but not from one whose callback came late.
    if (base_ == nullptr || now - base_seconds_ > 0.1) {
      std::swap(base_, span.end);
      base_seconds_ = now;
    }
    if (span.end != nullptr) free_.push_back(span.end);
  }
}

}  // namespace oom
