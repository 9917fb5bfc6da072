// DataPlane moves bytes between the job's pools and a worker's buffers, and waits for and publishes the words that order
// those moves between processes (architecture, idea 5). Each call runs on the stream thread of its resource: the CPU
// device copies there, a GPU enqueues the copy on the resource's CUDA stream once the host's words allow it.
// Thread-safe for calls of different resources.

#pragma once

#include <cstdint>
#include <span>

#include "oom/v1/plan.pb.h"
#include "runtime/base/status.h"
#include "runtime/graph/step_graph.h"
#include "runtime/memory/control_page.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/optim/adamw.h"
#include "runtime/optim/schedule.h"
#include "worker/transfer_counts.h"

namespace oom {

class DataPlane {
 public:
  struct Options {
    // All must outlive the object. `pools` has the device's own address for pools of this rank's device.
    const SharedLayout* layout = nullptr;
    const PoolMap* pools = nullptr;
    const ControlPage* page = nullptr;
    int rank = 0;
    int accumulation = 1;
    v1::UpdateMode update_mode = v1::UPDATE_MODE_OVERLAPPED;
    AdamWHyperparameters hyper;
    Schedule schedule;
    SimdLevel simd = SimdLevel::kScalar;
    WaitOptions wait;
  };

  // What a rank says of a step once its last micro-batch has its loss.
  struct Loss {
    const double* loss_sum = nullptr;  // In the device's memory.
    int64_t valid_targets = 0;
    const double* auxiliary_loss = nullptr;  // There too; null: none.
  };

  explicit DataPlane(const Options& options);
  virtual ~DataPlane() = default;
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  // The step's row set: the distinct tokens of this rank's whole batch, rising. Before the rank's loss is published.
  virtual Status PublishRowSet(int64_t step, std::span<const int32_t> row_numbers);
  // The embedding's rows of `tokens` to `out` [tokens, width], each chunk of them at this step's version.
  // `device_tokens`: the same tokens in the device's memory.
  virtual Status GatherRows(const Node& node, int64_t step, int64_t width,
                            std::span<const int32_t> tokens, const int32_t* device_tokens,
                            std::byte* out) = 0;

  // Waits for the unit's newest version and copies it into `window`, of a sharded unit this rank's slice of each chunk.
  // kAborted if the attempt ends.
  Status LoadUnit(const Node& node, int64_t step, std::byte* window);
  // The other ranks' slices of a sharded unit, each rank having loaded its own.
  Status GatherUnit(const Node& node, std::byte* window);
  // The unit's weights where they lie. REQUIRES: resident on the only rank. Waits for the version.
  virtual Result<std::byte*> WeightsInPlace(int64_t unit, int64_t step) = 0;

  // Device reduction: adds up the ranks' FP32 partials of node.chunk, as they are or each rounded to BF16, and leaves this
  // rank's slice of the sum in `slice`, in the same type. `unit_gradient` is the unit's FP32 gradient buffer.
  virtual Status ReduceGradient(const Node& node, const float* unit_gradient, std::byte* slice) = 0;
  // Stores this rank's FP32 partial of node.chunk where its updater reads it: rounded once to BF16, or FP32
  // (float32, or accumulation: added to the micro-batches before). Publishes `landed` on the last one.
  // `from` is the unit's FP32 gradient buffer, with device reduction what ReduceGradient left.
  virtual Status StoreGradient(const Node& node, int64_t step, const std::byte* from) = 0;
  // The embedding's gradient: `sums` [rows, width] of `elements` FP32 values, in the order of the row set.
  virtual Status StoreRows(const Node& node, int64_t step, const float* sums, int64_t elements) = 0;

  Status StoreBoundary(const Node& node, const std::byte* from);
  Status LoadBoundary(const Node& node, std::byte* to);

  // Load-balancing loss of several ranks. Once this rank's forward is done: what its routers chose,
  // int64 [E] in the device's memory, and its tokens summed over routed layers.
  virtual Status PublishRouterCounts(int64_t step, const int64_t* choices_E, int64_t tokens) = 0;
  // Waits for every rank's counts of the step, this one's included, and leaves their sum, in rank
  // order, in `choices_E` (device memory); returns the tokens of all. kAborted if the attempt ends.
  virtual Result<int64_t> SumRouterCounts(int64_t step, int64_t* choices_E) = 0;

  virtual Status PublishLoss(int64_t step, const Loss& loss) = 0;
  // Of a resident chunk of this rank. Norm or Update fails with NON_FINITE_GRADIENT (the unit is named).
  virtual Status Norm(const Node& node, int64_t step) = 0;
  virtual Status Update(const Node& node, int64_t step) = 0;

  // Waits for `word` to reach `target`; kAborted if the attempt ends.
  Status Await(const SharedWord& word, int64_t target) const;

  const TransferCounts& transfers() const { return transfers_; }

 protected:
  // Between the device's memory and a region of the job's pools.
  virtual Status CopyIn(std::byte* to, const Region& from) = 0;
  virtual Status CopyOut(const Region& to, const void* from) = 0;
  // The weights of a resident chunk from its owner; every rank calls this in the same order.
  virtual Status CopyFromOwner(std::byte* to, const Chunk& chunk) = 0;
  // The other ranks' slices of a streamed chunk to their places in `to`; likewise.
  virtual Status GatherSlices(std::byte* to, const Chunk& chunk) = 0;
  // What StoreGradient takes: values of node.chunk from the unit's gradient buffer, or a slice.
  struct StoredGradient {
    const std::byte* values = nullptr;
    bool bfloat16 = false;
    int64_t elements = 0;
    Region place;
  };
  StoredGradient ToStore(const Node& node, int64_t step, const std::byte* from) const;
  Status AwaitVersion(int64_t chunk, int64_t step) const;
  // Before a gradient goes to its place in step `step`: the last one in it has to be gone.
  Status AwaitSlot(int64_t chunk, int64_t step) const;
  // Before the embedding's rows do: every update of the step before has to have read them.
  Status AwaitRowsRead(const Node& node, int64_t step) const;
  // SumRouterCounts into host memory.
  Result<int64_t> AddRouterCounts(int64_t step, std::span<int64_t> choices_E) const;
  // Overlapped: every rank's loss is known and finite. Deferred: the clip factor is known.
  Status AwaitGate(int64_t step, double* clip) const;

  const Options options_;
  TransferCounts transfers_;
};

}  // namespace oom
