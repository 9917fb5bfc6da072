// ChunkUpdate applies the update rule to ranges of one chunk, wherever its state lives: the job host's
// optimizer threads call it for streamed chunks, the owning worker for resident ones. Both therefore use the
// very same gradient values and arithmetic (engine rules, sections 2 and 3).
// Thread-safe on disjoint ranges; each calling thread passes its own Scratch.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/optim/adamw.h"

namespace oom {

// By block of the unit: 1 where weight decay applies.
std::vector<uint8_t> DecayedBlocks(const ParameterUnit& unit);

// Reason NON_FINITE_GRADIENT: the chunk's unit and the step (from 1) are named.
Status NonFiniteGradient(const SharedLayout& layout, int64_t chunk, int64_t step);

class ChunkUpdate {
 public:
  // Buffers of one thread: partials that have to be made dense or rounded first.
  struct Scratch {
    std::vector<uint16_t> bfloat16;
    std::vector<float> float32;
  };

  // Both must outlive the object. `accumulation` as in the plan.
  ChunkUpdate(const SharedLayout* layout, const PoolMap* pools, int accumulation, SimdLevel level);

  // Of a chunk of the embedding, by block: 1 if a row of some rank's batch lies in it; elsewhere the gradient is 0.
  // Valid from the ranks' loss_known on.
  std::vector<char> BlocksWithRows(int64_t chunk, int64_t step) const;

  // Squares of the summed gradient of blocks [first_block, first_block + out.size()) of the chunk.
  // Returns false if a value is not finite.
  bool Squares(int64_t chunk, int64_t step, int64_t first_block, std::span<double> out,
               Scratch* scratch) const;

  // Updates blocks [first_block, first_block + block_count) of the chunk in place.
  // `decayed` and `plain` are the scalars with and without weight decay.
  void Apply(int64_t chunk, int64_t step, int64_t first_block, int64_t block_count,
             const AdamWScalars& decayed, const AdamWScalars& plain, Scratch* scratch) const;

 private:
  // Calls visit(partials, element count) for each run of blocks that one call can take: dense partials as
  // they lie in the pools, or one block at a time through the scratch.
  template <class Visit>
  void ForRuns(int64_t chunk, int64_t step, int64_t first_block, int64_t block_count,
               Scratch* scratch, const Visit& visit) const;
  template <class Element>
  void DenseRows(const Chunk& chunk, int64_t step, int64_t first_element,
                 std::vector<Element>* out) const;

  const SharedLayout* const layout_;
  const PoolMap* const pools_;
  const bool round_accumulators_;  // FP32 accumulators of a bfloat16 job are rounded once to BF16.
  const SimdLevel level_;
  std::vector<std::vector<uint8_t>> block_decayed_;  // By unit, by block of the unit.
};

}  // namespace oom
