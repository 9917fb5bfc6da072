// How the benchmarks here time the GPU: by events on the stream that has the work, and as the
// median of several runs. Nothing is done about caches between runs. How often a benchmark runs
// something, and on which stream, is its own choice.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace oom::testing {

// Times what is put on one stream.
class EventTimer {
 public:
  explicit EventTimer(cudaStream_t stream);
  ~EventTimer();
  EventTimer(const EventTimer&) = delete;
  EventTimer& operator=(const EventTimer&) = delete;

  // Of the stream between the events before and after `run`. Waits for the latter.
  double Seconds(const std::function<void()>& run) const;

 private:
  const cudaStream_t stream_;
  cudaEvent_t before_ = nullptr;
  cudaEvent_t after_ = nullptr;
};

// The upper one of the two of an even number of values.
double Median(std::vector<double> values);

struct TimingOptions {
  cudaStream_t stream = nullptr;
  int warm_ups = 0;      // Before the first timed run; none is waited for.
  int dropped_runs = 0;  // Timed runs that do not count, before those that do.
  int runs = 0;
};

double MedianSeconds(const TimingOptions& options, const std::function<void()>& run);

// The median of 20 launches of a graph of `run`, on a stream made for it.
double MedianGraphSeconds(const std::function<void(cudaStream_t)>& run);

// Runs what is not timed, and waits: later measurements may build on its results.
void RunOnce(const std::function<void(cudaStream_t)>& run);

// Bytes read and written a second by copies of `from` to other memory of the device. Not in a
// graph: there the same copy reached 2.8 TB/s on an H200, and 4.3 like this.
double CopyBytesPerSecond(const TimingOptions& options, const void* from, int64_t bytes);

}  // namespace oom::testing
