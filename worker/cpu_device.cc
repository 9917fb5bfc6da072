#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "runtime/base/check.h"
#include "runtime/checkpoint/fill_chunk.h"
#include "worker/cpu_data_plane.h"
#include "worker/device_memory.h"
#include "worker/worker_device.h"

namespace oom {
namespace {

constexpr int64_t kFillElements = int64_t{1} << 20;

class CpuDevice : public WorkerDevice {
 public:
  at::Device torch_device() const override { return at::kCPU; }
  DeviceAllocator& allocator() override { return allocator_; }

  Status Prepare(const SharedLayout& layout, int rank, const ControlPage&, PoolMap*) override {
    // A resident chunk lies in a shared pool of its owner.
    const std::string own_pool = "device." + std::to_string(rank);
    for (const PoolSpec& pool : layout.pools()) {
      if (pool.name == own_pool) CountDeviceBytes(pool.bytes);
    }
    return Status::Ok();
  }

  Status FillChunk(const StateSource& source, const SharedLayout& layout, const PoolMap& pools,
                   int64_t chunk, const std::function<void()>& on_progress) override {
    const int64_t elements = layout.chunks()[static_cast<size_t>(chunk)].elements;
    for (int64_t first = 0; first < elements; first += kFillElements) {
      OOM_RETURN_IF_ERROR(oom::FillChunk(source, layout, chunk, first,
                                         std::min(kFillElements, elements - first),
                                         pools.At(layout.weights(chunk)),
                                         pools.At(layout.rest(chunk))));
      on_progress();
    }
    return Status::Ok();
  }

  void OnFault(std::function<void(const Status&)>) override {}

  std::unique_ptr<Stream> MakeStream(Resource resource, int worker_threads) override {
    return MakeCpuStream(std::string(ResourceName(resource)), [worker_threads, resource] {
      // Both are settings of the calling thread. There is no autograd in training.
      at::set_num_threads(resource == Resource::kCompute ? worker_threads : 1);
      at::GradMode::set_enabled(false);
      OOM_CHECK(!at::GradMode::is_enabled());
    });
  }

  std::unique_ptr<DataPlane> MakeDataPlane(const DataPlane::Options& options) override {
    return std::make_unique<CpuDataPlane>(options);
  }

  bool times_always(const Node&) const override { return true; }
  Batch Upload(Batch batch, size_t, int64_t) override { return batch; }
  void KeepUntilRead(const at::Tensor&) override {}
  int64_t bytes_peak() const override { return DeviceBytesPeak(); }
  MemoryUse TakeMemoryUse() override { return TakeDeviceBytes(); }

 private:
  // Counts what it gives out among the device's bytes.
  class CountingAllocator : public CpuAllocator {
   public:
    Result<std::byte*> Allocate(int64_t bytes) override {
      CountDeviceBytes(bytes);
      return CpuAllocator::Allocate(bytes);
    }
  };
  CountingAllocator allocator_;
};

}  // namespace

std::unique_ptr<WorkerDevice> MakeCpuDevice() { return std::make_unique<CpuDevice>(); }

}  // namespace oom
