// CudaDataPlane is a GPU's side of the data plane. A call waits for the host's words on the resource's own thread, then
// enqueues the copy or kernel on that thread's CUDA stream, and behind it the device's store of the word that says so.
// Thread-safe for calls of different resources.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "runtime/comm/nccl_communicator.h"
#include "worker/data_plane.h"

namespace oom {

class CudaDataPlane : public DataPlane {
 public:
  // Device memory that the data plane works in; sizes by GpuScratchOf.
  struct Scratch {
    std::byte* partials = nullptr;      // Of the D2H stream: a chunk's rounded partial, or rows.
    // Of a resident embedding: its gradient's rows, their numbers in two steps, and a chunk of it made dense.
    std::byte* rows = nullptr;
    int32_t* row_numbers = nullptr;
    std::byte* row_gradient = nullptr;
    std::byte* exchanged = nullptr;     // Of the collective stream: a chunk's rounded partial for other ranks.
    uint8_t* decayed_blocks = nullptr;  // By block of the job: 1 if it is decayed.
    // In host memory that the device writes, by chunk, 1 at first: 0 once a value of its gradient was not finite.
    int32_t* finite = nullptr;
    // In page-locked host memory, [E]: the ranks' router counts, added up.
    int64_t* router_choices = nullptr;
  };
  // `communicator`: of the ranks, where the layout exchanges; must outlive the object.
  CudaDataPlane(const Options& options, const Scratch& scratch, NcclCommunicator* communicator);

  Status PublishRowSet(int64_t step, std::span<const int32_t> row_numbers) override;
  Status GatherRows(const Node& node, int64_t step, int64_t width, std::span<const int32_t> tokens,
                    const int32_t* device_tokens, std::byte* out) override;
  Result<std::byte*> WeightsInPlace(int64_t unit, int64_t step) override;
  Status ReduceGradient(const Node& node, const float* unit_gradient, std::byte* slice) override;
  Status StoreGradient(const Node& node, int64_t step, const std::byte* from) override;
  Status StoreRows(const Node& node, int64_t step, const float* sums, int64_t elements) override;
  Status PublishRouterCounts(int64_t step, const int64_t* choices_E, int64_t tokens) override;
  Result<int64_t> SumRouterCounts(int64_t step, int64_t* choices_E) override;
  Status PublishLoss(int64_t step, const Loss& loss) override;
  Status Norm(const Node& node, int64_t step) override;
  Status Update(const Node& node, int64_t step) override;

 private:
  // The pools' parts are registered.
  Status CopyIn(std::byte* to, const Region& from) override;
  Status CopyOut(const Region& to, const void* from) override;
  Status CopyFromOwner(std::byte* to, const Chunk& chunk) override;
  Status GatherSlices(std::byte* to, const Chunk& chunk) override;
  // Of a resident chunk: in this device's own memory, or to its owner's.
  Status StoreResident(const Node& node, const StoredGradient& stored);
  Status SendToOwner(const Node& node, int64_t step, const StoredGradient& stored);
  // Behind everything that this thread has enqueued.
  Status StoreWord(const SharedWord& word, int64_t value);
  // Calls use(partials) with the gradient of a resident chunk as the update rule takes it.
  template <class Use>
  void WithGradient(const Chunk& chunk, int64_t step, const Use& use);
  Status TakeSnapshot(int64_t chunk, int64_t step);

  const Scratch scratch_;
  NcclCommunicator* const communicator_;
};

}  // namespace oom
