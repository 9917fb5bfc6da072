#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "planner/memory_account.h"
#include "runtime/base/check.h"
#include "runtime/base/units.h"
#include "runtime/checkpoint/fill_chunk.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_memory.h"
#include "runtime/device/cuda_stream.h"
#include "runtime/device/cuda_timeline.h"
#include "runtime/memory/gpu_scratch.h"
#include "runtime/ops/cuda/cuda_operators.h"
#include "runtime/optim/chunk_update.h"
#include "worker/cuda_data_plane.h"
#include "worker/worker_device.h"

namespace oom {
namespace {

constexpr size_t kBatchSlots = 4;
constexpr int kGrowthLooks = 8;
constexpr std::chrono::seconds kHeartbeatInterval{1};
// Of a whole GPU, which a plan may count on, the driver keeps less than this for itself.
constexpr int64_t kDriverReserveBytes = 1_GiB;

class CudaAllocator : public DeviceAllocator {
 public:
  ~CudaAllocator() override {
    for (void* piece : pieces_) static_cast<void>(cudaFree(piece));
  }

  Result<std::byte*> Allocate(int64_t bytes) override {
    void* piece = nullptr;
    const auto size = static_cast<size_t>(bytes);
    std::string what = "cannot take " + FormatBytes(bytes) + " of device memory";
    if (const cudaError_t error = cudaMalloc(&piece, size); error != cudaSuccess) {
      size_t free_bytes = 0, total_bytes = 0;
      if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
        what += " (" + FormatBytes(static_cast<int64_t>(free_bytes)) + " are free of " +
                FormatBytes(static_cast<int64_t>(total_bytes)) + ", the job has taken " +
                FormatBytes(bytes_) + ")";
      }
      return CudaStatus(error, what);
    }
    pieces_.push_back(piece);
    OOM_RETURN_IF_CUDA_ERROR(cudaMemset(piece, 0, size), what);
    bytes_ += bytes;
    return static_cast<std::byte*>(piece);
  }

  int64_t bytes() const { return bytes_; }

 private:
  std::vector<void*> pieces_;
  int64_t bytes_ = 0;
};

// Host memory of this process that the device reads and writes.
class PinnedMemory {
 public:
  static Result<PinnedMemory> Allocate(int64_t bytes) {
    PinnedMemory memory;
    void* data = nullptr;
    OOM_RETURN_IF_CUDA_ERROR(
        cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped),
        "cannot take " + FormatBytes(bytes) + " of page-locked memory");
    memory.data_.reset(static_cast<std::byte*>(data));
    return memory;
  }
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const { static_cast<void>(cudaFreeHost(data)); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

// A tensor of a batch on its way in: its place on the device and its staging, taken when the first batch comes.
class UploadedTensor {
 public:
  at::Tensor Upload(const at::Tensor& host, int64_t capacity, at::Device device) {
    if (!device_.defined()) {
      device_ = at::empty({capacity}, host.options().device(device));
      staging_ = at::empty({capacity}, host.options().pinned_memory(true));
    }
    OOM_CHECK(host.numel() <= device_.numel());
    staging_.narrow(0, 0, host.numel()).copy_(host);
    at::Tensor part = device_.narrow(0, 0, host.numel());
    part.copy_(staging_.narrow(0, 0, host.numel()), /*non_blocking=*/true);
    return part;
  }

 private:
  at::Tensor device_;
  at::Tensor staging_;
};

class CudaDevice : public WorkerDevice {
 public:
  // `context_bytes`: taken of the device before anything was allocated, which left `free_bytes`. A budget of 0: no
  // limit.
  CudaDevice(int index, int64_t context_bytes, int64_t free_bytes, int64_t memory_budget_bytes)
      : index_(index),
        context_bytes_(context_bytes),
        free_bytes_(free_bytes),
        memory_budget_bytes_(memory_budget_bytes),
        timeline_(std::make_unique<CudaTimeline>(&faults_)) {}

  at::Device torch_device() const override {
    return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index_));
  }
  DeviceAllocator& allocator() override { return allocator_; }

  Status Prepare(const SharedLayout& layout, int rank, const ControlPage& page,
                 PoolMap* pools) override {
    const std::string number = std::to_string(rank);
    OOM_RETURN_IF_ERROR(AwaitTurn(page, rank));
    for (size_t i = 0; i < layout.pools().size(); ++i) {
      const PoolSpec& pool = layout.pools()[i];
      const std::string kind = pool.name.substr(0, pool.name.find('.'));
      const bool own = pool.name == kind + "." + number;
      if (kind == "device" && own) {
        OOM_ASSIGN_OR_RETURN(pools->bases[i], allocator_.Allocate(pool.bytes));
      } else if (kind == "weights" || kind == "gradients" || (kind == "activations" && own)) {
        // Moments are the host's alone, and a snapshot is taken too seldom to lock its memory.
        OOM_RETURN_IF_ERROR(Register({pools->bases[i], static_cast<size_t>(pool.bytes)}));
      }
    }
    OOM_RETURN_IF_ERROR(Register(page.memory()));
    page.registered().Publish(static_cast<uint64_t>(rank + 1));

    const GpuScratchBytes needs = GpuScratchOf(layout, rank);
    OOM_RETURN_IF_ERROR(Take(needs.partials, &scratch_.partials));
    OOM_RETURN_IF_ERROR(Take(needs.rows, &scratch_.rows));
    OOM_RETURN_IF_ERROR(Take(needs.row_numbers, &scratch_.row_numbers));
    OOM_RETURN_IF_ERROR(Take(needs.row_gradient, &scratch_.row_gradient));
    OOM_RETURN_IF_ERROR(Take(needs.exchanged, &scratch_.exchanged));
    OOM_RETURN_IF_ERROR(Take(needs.decayed_blocks, &scratch_.decayed_blocks));
    std::vector<uint8_t> decayed;
    for (const ParameterUnit& unit : layout.units()) {
      const std::vector<uint8_t> blocks = DecayedBlocks(unit);
      decayed.insert(decayed.end(), blocks.begin(), blocks.end());
    }
    OOM_RETURN_IF_CUDA_ERROR(cudaMemcpy(scratch_.decayed_blocks, decayed.data(), decayed.size(),
                                        cudaMemcpyHostToDevice),
                             "cannot copy to the device");
    OOM_ASSIGN_OR_RETURN(finite_, PinnedMemory::Allocate(static_cast<int64_t>(
                                      layout.chunks().size() * sizeof(int32_t))));
    scratch_.finite = reinterpret_cast<int32_t*>(finite_.data());
    std::fill_n(scratch_.finite, layout.chunks().size(), 1);
    if (const int64_t experts = page.layout().expert_count; experts > 0) {
      OOM_ASSIGN_OR_RETURN(router_choices_,
                           PinnedMemory::Allocate(experts * static_cast<int64_t>(sizeof(int64_t))));
      scratch_.router_choices = reinterpret_cast<int64_t*>(router_choices_.data());
    }
    if (layout.exchanges()) {
      OOM_ASSIGN_OR_RETURN(communicator_, NcclCommunicator::Join(rank, &page));
    }
    return Status::Ok();
  }

  Status FillChunk(const StateSource& source, const SharedLayout& layout, const PoolMap& pools,
                   int64_t chunk, const std::function<void()>& on_progress) override {
    const Region weights = layout.weights(chunk);
    const Region rest = layout.rest(chunk);
    // Of any thread, and those have no device yet.
    OOM_RETURN_IF_CUDA_ERROR(cudaSetDevice(index_), "the GPU cannot be used");
    std::vector<std::byte> staging(static_cast<size_t>(weights.bytes + rest.bytes));
    OOM_RETURN_IF_ERROR(oom::FillChunk(source, layout, chunk, 0,
                                       layout.chunks()[static_cast<size_t>(chunk)].elements,
                                       staging.data(), staging.data() + weights.bytes));
    on_progress();
    const auto copy = [&](const Region& region, const std::byte* from) {
      return CudaStatus(cudaMemcpy(pools.At(region), from, static_cast<size_t>(region.bytes),
                                   cudaMemcpyHostToDevice),
                        "cannot copy to the device");
    };
    OOM_RETURN_IF_ERROR(copy(weights, staging.data()));
    return copy(rest, staging.data() + weights.bytes);
  }

  void OnFault(std::function<void(const Status&)> listener) override {
    faults_.Listen(std::move(listener));
  }

  std::unique_ptr<Stream> MakeStream(Resource resource, int) override {
    // What compute waits for goes before what nobody waits for.
    const int priority = resource == Resource::kDeviceUpdate ? 0 : -1;
    return MakeCudaStream(
        std::string(ResourceName(resource)), priority, timeline_.get(), &faults_, [index = index_] {
          at::set_num_threads(1);
          at::GradMode::set_enabled(false);
          OOM_CHECK(!at::GradMode::is_enabled());
          c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(
              CurrentCudaStream(), static_cast<c10::DeviceIndex>(index)));
        });
  }

  std::unique_ptr<DataPlane> MakeDataPlane(const DataPlane::Options& options) override {
    CapOperators();
    DataPlane::Options polling = options;
    // This device writes some of the words that its own threads wait for.
    polling.wait.sleep_slice = kDevicePollInterval;
    return std::make_unique<CudaDataPlane>(polling, scratch_, communicator_.get());
  }

  bool times_always(const Node& node) const override {
    return node.resource == Resource::kCompute;
  }

  Batch Upload(Batch batch, size_t slot, int64_t most_tokens) override {
    Slot& into = slots_[slot];
    const at::Device device = torch_device();
    batch.tokens = into.tokens.Upload(batch.tokens, most_tokens, device);
    batch.targets = into.targets.Upload(batch.targets, most_tokens, device);
    batch.packed.positions = into.positions.Upload(batch.packed.positions, most_tokens, device);
    batch.packed.document_starts =
        into.document_starts.Upload(batch.packed.document_starts, most_tokens + 1, device);
    return batch;
  }

  void KeepUntilRead(const at::Tensor& tensor) override {
    c10::cuda::CUDACachingAllocator::recordStream(
        tensor.storage().data_ptr(),
        c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(index_)));
  }

  int64_t bytes_peak() const override {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(
        static_cast<c10::DeviceIndex>(index_));
    return context_bytes_ + LibraryGrowth(stats.reserved_bytes[0].current) + allocator_.bytes() +
           std::max(reserved_peak_.load(), stats.reserved_bytes[0].peak);
  }

  MemoryUse TakeMemoryUse() override {
    const auto index = static_cast<c10::DeviceIndex>(index_);
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index);
    reserved_peak_ = std::max(reserved_peak_.load(), stats.reserved_bytes[0].peak);
    c10::cuda::CUDACachingAllocator::resetPeakStats(index);
    return {.bytes = allocator_.bytes() + stats.allocated_bytes[0].current,
            .peak_bytes = allocator_.bytes() + stats.allocated_bytes[0].peak};
  }

 private:
  struct Slot {
    UploadedTensor tokens, targets, positions, document_starts;
  };

  // The driver's and the kernel's locks make workers that register at once slower than one after the other.
  static Status AwaitTurn(const ControlPage& page, int rank) {
    while (true) {
      switch (page.registered().WaitAtLeast(static_cast<uint64_t>(rank), page.aborted(),
                                            {.timeout = kHeartbeatInterval})) {
        case WaitResult::kReached: return Status::Ok();
        case WaitResult::kAborted: return Status(Code::kAborted, "the attempt was aborted");
        case WaitResult::kTimeout: page.heartbeat(rank).Ring();
      }
    }
  }

  Status Register(std::span<std::byte> memory) {
    OOM_ASSIGN_OR_RETURN(RegisteredMemory registered, RegisteredMemory::Register(memory));
    registered_.push_back(std::move(registered));
    return Status::Ok();
  }

  // What the context has grown by: kernels are loaded at their first use, so after a few looks it stays.
  int64_t LibraryGrowth(int64_t reserved_bytes) const {
    size_t free_bytes = 0, total_bytes = 0;
    if (growth_looks_ < kGrowthLooks && cudaSetDevice(index_) == cudaSuccess &&
        cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
      ++growth_looks_;
      const int64_t growth = free_bytes_ - static_cast<int64_t>(free_bytes) - allocator_.bytes() -
                             reserved_bytes;
      // More is another process's.
      if (growth <= 2 * kGpuLibraryGrowthBytes) growth_bytes_ = std::max(growth_bytes_, growth);
    }
    return growth_bytes_;
  }

  // What the plan names is taken; operators may take the rest of the budget, but for what libraries still load.
  void CapOperators() {
    if (memory_budget_bytes_ == 0) return;
    size_t free_bytes = 0, total_bytes = 0;
    OOM_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    const double fraction =
        static_cast<double>(memory_budget_bytes_ - context_bytes_ - kGpuLibraryGrowthBytes -
                            allocator_.bytes()) /
        static_cast<double>(total_bytes);
    c10::cuda::CUDACachingAllocator::setMemoryFraction(std::clamp(fraction, 0.0, 1.0),
                                                       static_cast<c10::DeviceIndex>(index_));
  }

  template <class Element>
  Status Take(int64_t bytes, Element** out) {
    if (bytes == 0) return Status::Ok();
    OOM_ASSIGN_OR_RETURN(std::byte* const memory, allocator_.Allocate(bytes));
    *out = reinterpret_cast<Element*>(memory);
    return Status::Ok();
  }

  const int index_;
  const int64_t context_bytes_;
  const int64_t free_bytes_;
  mutable int growth_looks_ = 0;
  mutable int64_t growth_bytes_ = 0;
  const int64_t memory_budget_bytes_;
  std::atomic<int64_t> reserved_peak_{0};  // Up to the last look at memory in use, which starts the allocator's own anew.
  CudaAllocator allocator_;
  std::vector<RegisteredMemory> registered_;
  PinnedMemory finite_;
  PinnedMemory router_choices_;
  CudaDataPlane::Scratch scratch_;
  std::unique_ptr<NcclCommunicator> communicator_;  // Where ranks exchange.
  std::array<Slot, kBatchSlots> slots_;  // Of the H2D stream.
  CudaFaults faults_;
  std::unique_ptr<CudaTimeline> timeline_;
};

}  // namespace

Result<std::unique_ptr<WorkerDevice>> MakeCudaDevice(const CudaDeviceOptions& options) {
  const int index = options.index;
  int count = 0;
  OOM_RETURN_IF_CUDA_ERROR(cudaGetDeviceCount(&count), "no GPU can be used");
  if (index >= count) {
    return Status(Code::kFailedPrecondition, "device " + std::to_string(index) + " is asked for, " +
                                                 std::to_string(count) + " can be used")
        .WithReason("NOT_ENOUGH_DEVICES");
  }
  const std::string name = "GPU " + std::to_string(index);
  OOM_RETURN_IF_CUDA_ERROR(cudaSetDevice(index), name + " cannot be used");
  int same_addresses = 0;
  OOM_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&same_addresses, cudaDevAttrCanUseHostPointerForRegisteredMem, index),
      name);
  if (same_addresses == 0) {
    return Status(Code::kFailedPrecondition, name + " does not see the host's addresses")
        .WithReason("NOT_ENOUGH_DEVICES");
  }
  size_t free_bytes = 0, total_bytes = 0;
  OOM_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes), name);
  const auto taken_bytes = static_cast<int64_t>(total_bytes - free_bytes);
  // This process's context is taken already.
  const int64_t has_bytes = static_cast<int64_t>(free_bytes) + kGpuContextBytes;
  if (has_bytes + kDriverReserveBytes < options.planned_bytes) {
    return Status(Code::kResourceExhausted,
                  name + " has " + FormatBytes(static_cast<int64_t>(free_bytes)) + " free of " +
                      FormatBytes(static_cast<int64_t>(total_bytes)) + ", the plan needs " +
                      FormatBytes(options.planned_bytes) +
                      ": end the other processes that use it (nvidia-smi lists them), or set "
                      "budgets.gpu_memory to less")
        .WithReason("OUT_OF_GPU_MEMORY");
  }
  // More than a context takes is other processes'.
  const int64_t context_bytes = taken_bytes > 2 * kGpuContextBytes ? kGpuContextBytes : taken_bytes;

  InstallCudaOperators();
  // FP32 means FP32, and a product is not rounded before it is complete.
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
  at::globalContext().setAllowBF16ReductionCuBLAS(false, /*allow_splitk=*/true);
  at::globalContext().setDeterministicAlgorithms(options.deterministic, /*warn_only=*/false);
  // Nobody reads what was not written: no operator fills what it is about to write.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  // Blocks of a size that comes and goes leave no holes. What the user has set stays.
  if (std::getenv("PYTORCH_CUDA_ALLOC_CONF") == nullptr &&
      std::getenv("PYTORCH_ALLOC_CONF") == nullptr) {
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  }
  c10::cuda::CUDACachingAllocator::init(count);
  return std::unique_ptr<WorkerDevice>(
      std::make_unique<CudaDevice>(index, context_bytes, static_cast<int64_t>(free_bytes),
                                   options.memory_budget_bytes));
}

}  // namespace oom
