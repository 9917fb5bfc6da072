// A stream of the CUDA device: a host thread that takes the executor's work in order and enqueues it on one CUDA
// stream, so that work may wait for the host's words before it enqueues (kernels reference, section 7) and no stream
// ever waits on the device for the host. An event carries the CUDA event beside the ticket: the waiting thread waits
// until the event is recorded, the waiting CUDA stream until it has happened.

#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>

#include "runtime/device/cuda_faults.h"
#include "runtime/device/cuda_timeline.h"
#include "runtime/device/stream.h"

namespace oom {

// The CUDA stream of the calling thread, a thread of MakeCudaStream; elsewhere the default stream.
cudaStream_t CurrentCudaStream();

// Of the current device. `start` is called on the thread, once CurrentCudaStream is set. `timeline`
// and `faults` must outlive it. Lower `priority` numbers go first (cudaStreamCreateWithPriority).
std::unique_ptr<Stream> MakeCudaStream(const std::string& name, int priority,
                                       CudaTimeline* timeline, CudaFaults* faults,
                                       std::function<void()> start);

}  // namespace oom
