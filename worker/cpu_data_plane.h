// CpuDataPlane is the CPU device's side of the data plane: it copies on the calling thread. Thread-safe for calls of
// different resources.

#pragma once

#include <vector>

#include "runtime/optim/chunk_update.h"
#include "worker/data_plane.h"

namespace oom {

class CpuDataPlane : public DataPlane {
 public:
  explicit CpuDataPlane(const Options& options);

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
  Status CopyIn(std::byte* to, const Region& from) override;
  Status CopyOut(const Region& to, const void* from) override;
  Status CopyFromOwner(std::byte* to, const Chunk& chunk) override;
  Status GatherSlices(std::byte* to, const Chunk& chunk) override;
  // Copies elements [first, first + elements) of the unit's weights to `out`, waiting for the version of the chunks
  // that hold them.
  Status CopyWeights(int64_t unit, int64_t step, int64_t first_element, int64_t elements,
                     std::byte* out);
  void TakeSnapshot(int64_t chunk, int64_t step) const;

  const ChunkUpdate update_;
  ChunkUpdate::Scratch scratch_;  // Of the device-update stream.
  // Of the collective stream: exchanges begun, and the sum of one.
  int64_t exchange_count_ = 0;
  std::vector<float> sum_;
};

}  // namespace oom
