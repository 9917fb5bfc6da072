// FakeWorker is one rank without LibTorch: the real executor, data plane and buffers around
// operators whose "compute" is ReferenceJob::Gradient of the weights that they find in their
// windows. Every node checks what a real operator relies on: weights of one version and not torn,
// boundaries that come back as they went. Issue and Drain: one thread.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "runtime/graph/executor.h"
#include "runtime/memory/control_page.h"
#include "tests/graph/engine_testing.h"
#include "worker/buffer_arena.h"
#include "worker/cpu_data_plane.h"

namespace oom::testing {

class FakeWorker : public NodeRunner {
 public:
  struct Options {
    // All must outlive the object.
    const TestJob* job = nullptr;
    const PoolMap* pools = nullptr;
    ControlPage* page = nullptr;
    uint64_t seed = 0;  // Of gradients, losses and tokens: as the reference's.
    int rank = 0;
    SimdLevel simd = SimdLevel::kScalar;
    // Called before the work of each node; may delay it, or fail it.
    std::function<Status(const Node&, int64_t step)> before_node;
    // Replaces the loss of a step.
    std::function<double(int64_t step, double loss)> loss;
    // May change a unit's FP32 gradient before it is stored.
    std::function<void(int64_t unit, int64_t step, float* gradient)> spoil;
  };

  explicit FakeWorker(const Options& options);
  ~FakeWorker() override;

  // Runs steps [first, last) and drains. The first failure; the page is aborted by it.
  Status RunSteps(int64_t first, int64_t last);

  Status Run(const Node& node, int64_t step) override;
  const TransferCounts& transfers() const { return plane_.transfers(); }
  int64_t arena_bytes() const { return arena_->bytes(); }

 private:
  using Digest = std::vector<float>;  // 16 lanes of each block of a unit.

  Status Compute(const Node& node, int64_t step);
  Result<const std::byte*> UnitBase(int64_t unit, int64_t buffer, int64_t step);
  // Reads the first 16 weights of each block of a unit; `whole`: fails if a block does not repeat
  // them.
  Status ReadUnit(int64_t unit, int64_t buffer, int64_t step, bool whole, Digest* digest);
  // Reads again, and fails if they are not those of the forward.
  Status ReadUnitAgain(int64_t unit, int64_t buffer, int64_t step);
  // Made-up router counts: every rank has to get the sum of this step's.
  Status ExchangeRouterCounts(const Node& node, int64_t step);
  void FillGradient(int64_t unit, int64_t buffer, const Node& node, int64_t step);
  Status GatherRows(const Node& node, int64_t step);
  void EmbeddingBackward(const Node& node, int64_t step);
  size_t BoundaryBytes() const;
  // Where the input of the node's layer comes back to: the plan's buffer, or what compute has taken
  // for it.
  std::byte* BoundaryPlace(const Node& node);
  float BoundaryValue(int64_t layer, int64_t step, int micro_batch) const;

  const Options options_;
  CpuDataPlane plane_;
  CpuAllocator device_;
  std::unique_ptr<BufferArena> arena_;
  std::vector<int64_t> layer_unit_;
  std::vector<int64_t> mixture_unit_;

  // Handed from node to node; only the graph's edges protect them.
  std::vector<std::vector<float>> activation_;
  std::vector<std::vector<float>> device_boundary_;
  std::vector<std::vector<std::byte>> boundary_in_;
  std::vector<Digest> digest_;  // Of the compute stream, by unit.
  struct Batch {
    std::vector<int64_t> tokens;
    std::vector<float> rows;  // 16 lanes a token.
  };
  std::vector<Batch> batches_;  // By micro-batch, of this step's parity.
  std::set<int64_t> row_set_;
  std::vector<float> row_sums_;

  std::unique_ptr<Executor> executor_;
  int graph_ = -1;
};

}  // namespace oom::testing
