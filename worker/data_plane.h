// CpuDataPlane moves bytes between the job's pools and a worker's buffers, and waits for and publishes the
// words that order those moves between processes (architecture, idea 5). It is the CPU device's side of the
// data plane: each call runs on the stream thread of its resource and copies there.
// Thread-safe for calls of different resources.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/base/status.h"
#include "runtime/graph/step_graph.h"
#include "runtime/memory/control_page.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/optim/adamw.h"
#include "runtime/optim/chunk_update.h"
#include "runtime/optim/schedule.h"
#include "worker/transfer_counts.h"

namespace oom {

class CpuDataPlane {
 public:
  struct Options {
    // All must outlive the object.
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
  explicit CpuDataPlane(const Options& options);

  // Waits for the unit's newest version and copies it into `window`. kAborted if the attempt ends.
  Status LoadUnit(const Node& node, int64_t step, std::byte* window);
  // The unit's weights where they lie. REQUIRES: resident on the only rank. Waits for the version.
  Result<std::byte*> WeightsInPlace(int64_t unit, int64_t step);
  // Copies elements [first, first + elements) of the unit's weights to `out`, waiting for the version of
  // the chunks that hold them.
  Status CopyWeights(int64_t unit, int64_t step, int64_t first_element, int64_t elements,
                     std::byte* out);

  // Stores this rank's FP32 partial of node.chunk where its updater reads it: rounded once to BF16, or FP32
  // (float32, or accumulation: added to the micro-batches before). Publishes `landed` on the last one.
  // `unit_gradient` is the unit's FP32 gradient buffer.
  Status StoreGradient(const Node& node, int64_t step, const float* unit_gradient);
  // The step's row set: the distinct tokens of this rank's whole batch, rising. Before the rank's loss is published.
  void PublishRowSet(int64_t step, std::span<const int32_t> row_numbers);
  // The embedding's gradient: `sums` [rows, width], in the order of the row set.
  Status StoreRows(const Node& node, int64_t step, std::span<const float> sums);

  Status StoreBoundary(const Node& node, const std::byte* from);
  Status LoadBoundary(const Node& node, std::byte* to);

  // Of a resident chunk of this rank.
  Status Norm(const Node& node, int64_t step);
  Status Update(const Node& node, int64_t step);

  // Waits for `word` to reach `target`; kAborted if the attempt ends.
  Status Await(const SharedWord& word, int64_t target) const;

  const TransferCounts& transfers() const { return transfers_; }

 private:
  Status AwaitVersion(int64_t chunk, int64_t step) const;
  Status AwaitGate(int64_t step, double* clip) const;
  void TakeSnapshot(int64_t chunk, int64_t step) const;

  const Options options_;
  const ChunkUpdate update_;
  ChunkUpdate::Scratch scratch_;   // Of the device-update stream.
  TransferCounts transfers_;
};

}  // namespace oom
