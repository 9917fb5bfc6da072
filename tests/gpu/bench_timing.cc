#include "tests/gpu/bench_timing.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "tests/gpu/cuda_check.h"

namespace oom::testing {

EventTimer::EventTimer(cudaStream_t stream) : stream_(stream) {
  CheckCuda(cudaEventCreate(&before_));
  CheckCuda(cudaEventCreate(&after_));
}

EventTimer::~EventTimer() {
  static_cast<void>(cudaEventDestroy(before_));
  static_cast<void>(cudaEventDestroy(after_));
}

double EventTimer::Seconds(const std::function<void()>& run) const {
  CheckCuda(cudaEventRecord(before_, stream_));
  run();
  CheckCuda(cudaEventRecord(after_, stream_));
  CheckCuda(cudaEventSynchronize(after_));
  float milliseconds = 0.0f;
  CheckCuda(cudaEventElapsedTime(&milliseconds, before_, after_));
  return milliseconds * 1e-3;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double MedianSeconds(const TimingOptions& options, const std::function<void()>& run) {
  const EventTimer timer(options.stream);
  for (int i = 0; i < options.warm_ups; ++i) run();
  std::vector<double> seconds;
  for (int i = 0; i < options.dropped_runs + options.runs; ++i) {
    const double time = timer.Seconds(run);
    if (i >= options.dropped_runs) seconds.push_back(time);
  }
  return Median(std::move(seconds));
}

double MedianGraphSeconds(const std::function<void(cudaStream_t)>& run) {
  // Stream and graph stay for the length of the program.
  cudaStream_t stream;
  CheckCuda(cudaStreamCreate(&stream));
  for (int i = 0; i < 3; ++i) run(stream);
  CheckCuda(cudaStreamSynchronize(stream));
  // A graph leaves the launch gaps of the host out.
  cudaGraph_t graph;
  cudaGraphExec_t program;
  CheckCuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run(stream);
  CheckCuda(cudaStreamEndCapture(stream, &graph));
  CheckCuda(cudaGraphInstantiate(&program, graph, 0));
  return MedianSeconds({.stream = stream, .dropped_runs = 3, .runs = 20},
                       [&] { CheckCuda(cudaGraphLaunch(program, stream)); });
}

void RunOnce(const std::function<void(cudaStream_t)>& run) {
  run(nullptr);
  CheckCuda(cudaDeviceSynchronize());
}

double CopyBytesPerSecond(const TimingOptions& options, const void* from, int64_t bytes) {
  void* to = nullptr;
  CheckCuda(cudaMalloc(&to, bytes));
  const double seconds = MedianSeconds(options, [&] {
    CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, options.stream));
  });
  CheckCuda(cudaFree(to));
  return 2.0 * static_cast<double>(bytes) / seconds;
}

}  // namespace oom::testing
