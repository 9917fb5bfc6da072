#include "runtime/device/cuda_stream.h"

#include <atomic>
#include <utility>

#include "runtime/device/cuda_check.h"

namespace oom {
namespace {

thread_local cudaStream_t current_stream = nullptr;

class CudaEvent : public DeviceEvent {
 public:
  explicit CudaEvent(CudaFaults* faults) {
    faults->Note(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "an event");
  }
  ~CudaEvent() override { static_cast<void>(cudaEventDestroy(event_)); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaStream : public Stream {
 public:
  CudaStream(const std::string& name, int priority, CudaTimeline* timeline, CudaFaults* faults,
             std::function<void()> start)
      : timeline_(timeline), faults_(faults) {
    int device = 0;
    OOM_CUDA_CHECK(cudaGetDevice(&device));
    OOM_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority));
    thread_ = MakeCpuStream(name, [device, stream = stream_, start = std::move(start)] {
      OOM_CUDA_CHECK(cudaSetDevice(device));
      current_stream = stream;
      if (start) start();
    });
  }

  ~CudaStream() override {
    thread_.reset();
    // What it handed over calls back into this object.
    timeline_->Flush();
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }

  void Launch(std::function<void()> work, Done done) override {
    if (!done) return thread_->Launch(std::move(work), nullptr);
    thread_->Launch(
        [this, work = std::move(work), done = std::move(done)]() mutable {
          const cudaEvent_t start = timeline_->Mark(stream_);
          work();
          const cudaEvent_t end = timeline_->Mark(stream_);
          timeline_->HandOver(start, end, [this, done = std::move(done)](double from, double to) {
            NoteGap(from, to);
            done(from, to);
          });
        },
        nullptr);
  }

  void Record(Event* event, uint64_t ticket) override {
    thread_->Launch(
        [this, event, ticket] {
          if (!event->device) event->device = std::make_unique<CudaEvent>(faults_);
          faults_->Note(cudaEventRecord(static_cast<CudaEvent&>(*event->device).get(), stream_),
                        "a stream's event");
          event->Raise(ticket);
        },
        nullptr);
  }

  void Wait(const Event* event, uint64_t ticket) override {
    thread_->Launch(
        [this, event, ticket] {
          // Reached from the start, by nobody.
          if (ticket == 0) return;
          static_cast<void>(event->Await(ticket));
          faults_->Note(
              cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(*event->device).get(), 0),
              "a stream's wait for another");
        },
        nullptr);
  }

  double wait_seconds() const override {
    return static_cast<double>(waited_nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  }

 private:
  // On the timeline's thread: what lies between two pieces of work in which times are wanted is waiting.
  void NoteGap(double start, double end) {
    if (last_end_ > 0.0 && start > last_end_) {
      waited_nanoseconds_ += static_cast<int64_t>((start - last_end_) * 1e9);
    }
    last_end_ = end;
  }

  CudaTimeline* const timeline_;
  CudaFaults* const faults_;
  cudaStream_t stream_ = nullptr;
  double last_end_ = 0.0;
  std::atomic<int64_t> waited_nanoseconds_{0};
  std::unique_ptr<Stream> thread_;
};

}  // namespace

cudaStream_t CurrentCudaStream() { return current_stream; }

std::unique_ptr<Stream> MakeCudaStream(const std::string& name, int priority,
                                       CudaTimeline* timeline, CudaFaults* faults,
                                       std::function<void()> start) {
  return std::make_unique<CudaStream>(name, priority, timeline, faults, std::move(start));
}

}  // namespace oom
