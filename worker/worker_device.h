// WorkerDevice is what a rank computes on: its memory, its streams, and its side of the data plane. The CPU's is in
// cpu_device.cc, the GPU's in cuda_device.cc; everything else in worker/ is the same for both.
// Prepare, allocator() and the Make functions: one thread, before the first step, MakeDataPlane after everything was
// allocated. The rest: the stream threads.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/base/status.h"
#include "runtime/device/stream.h"
#include "runtime/graph/step_graph.h"
#include "runtime/memory/control_page.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/state_source.h"
#include "runtime/ops/aten.h"
#include "worker/batch_reader.h"
#include "worker/data_plane.h"
#include "worker/device_allocator.h"

namespace oom {

// Bytes of the device's memory that the plan's buffers and the operators have.
struct MemoryUse {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;  // The most since the last look.
};

class WorkerDevice {
 public:
  virtual ~WorkerDevice() = default;

  // Where tensors live.
  virtual at::Device torch_device() const = 0;
  virtual DeviceAllocator& allocator() = 0;

  // Makes the job's shared memory reachable for this device. On return `pools` holds, for the pools of this rank's own
  // device, addresses in its memory. All must outlive the object. Fails with kResourceExhausted or kFailedPrecondition
  // (what to change is in the message).
  virtual Status Prepare(const SharedLayout& layout, int rank, const ControlPage& page,
                         PoolMap* pools) = 0;
  // Fills a resident chunk of this rank. Codes of StateSource::Read.
  virtual Status FillChunk(const StateSource& source, const SharedLayout& layout,
                           const PoolMap& pools, int64_t chunk,
                           const std::function<void()>& on_progress) = 0;

  // `listener` is called at most once, on any thread: the device has failed, though no call that
  // returns a Status said so. Its streams run dry. Before the first MakeStream.
  virtual void OnFault(std::function<void(const Status&)> listener) = 0;
  virtual std::unique_ptr<Stream> MakeStream(Resource resource, int worker_threads) = 0;
  virtual std::unique_ptr<DataPlane> MakeDataPlane(const DataPlane::Options& options) = 0;
  // Whether the times of a node are wanted though nobody traces it.
  virtual bool times_always(const Node& node) const = 0;

  // The batch in device memory. `slot` numbers batches in flight; what is uploaded stays until the slot is used again.
  // No batch has more than `most_tokens`.
  virtual Batch Upload(Batch batch, size_t slot, int64_t most_tokens) = 0;
  // The calling thread's stream reads the tensor, which another stream made: its memory is not used again before that.
  virtual void KeepUntilRead(const at::Tensor& tensor) = 0;

  // Of the device's memory, since the start of the process.
  virtual int64_t bytes_peak() const = 0;
  // Now, in the order in which operators were issued. The compute stream's thread.
  virtual MemoryUse TakeMemoryUse() = 0;
};

std::unique_ptr<WorkerDevice> MakeCpuDevice();

struct CudaDeviceOptions {
  int index = 0;                    // Of the visible GPUs.
  int64_t memory_budget_bytes = 0;  // 0: all.
  int64_t planned_bytes = 0;        // Of the plan, the CUDA context with it.
  bool deterministic = false;       // Repeatable operators only.
};
// Fails with kFailedPrecondition (reason NOT_ENOUGH_DEVICES), or kResourceExhausted
// (OUT_OF_GPU_MEMORY) if others hold what the plan needs.
Result<std::unique_ptr<WorkerDevice>> MakeCudaDevice(const CudaDeviceOptions& options);

}  // namespace oom
