// Where every shared byte of a job lies: chunks, and for each the regions of its weights, its moments and its
// gradients in the job's pools. Computed from model, plan and job alike by oomd (which creates the pools),
// the job host and the workers; nothing of it is sent. Bytes are described in shm_layout.md.
// Immutable after Build; thread-safe.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/base/status.h"
#include "runtime/memory/control_page.h"
#include "runtime/model/description.h"
#include "runtime/model/unit.h"

namespace oom {

// A part of a unit: the granularity of delivery, gradients, updates and snapshots.
struct Chunk {
  int64_t index = 0;            // In the job: the number of its words.
  int64_t unit = 0;
  int64_t first_element = 0;    // In the unit, with padding; a multiple of rank_count * 4,096.
  int64_t elements = 0;
  int64_t first_block = 0;      // In the job's canonical block order (norm_squares).
  int owner_rank = -1;          // Of a resident chunk; -1: streamed, updated by the job host.
  int numa_node = 0;            // Of a streamed chunk.
};

// Bytes in a pool.
struct Region {
  int pool = -1;                // Index into SharedLayout::pools().
  int64_t offset_bytes = 0;
  int64_t bytes = 0;
};

struct PoolSpec {
  std::string name;             // "weights.0", "rest.0", "gradients.0", "activations.1", "device.1", ...
  int numa_node = 0;
  int64_t bytes = 0;
  // "device.R" of GPUs: rank R takes it from its GPU; there is no host memory of that name.
  bool on_gpu = false;
};

// Sizes of one micro-batch on one rank that the layout needs beside model and plan.
struct BatchShape {
  int64_t micro_batch_sequences = 0;
  int64_t sequence_length = 0;
  int accumulation = 1;
  int64_t micro_batch_tokens() const { return micro_batch_sequences * sequence_length; }
  int64_t rank_tokens() const { return micro_batch_tokens() * accumulation; }
};

class SharedLayout {
 public:
  // REQUIRES: `plan` was validated against the model (one UnitPlan a unit, positive sizes).
  static SharedLayout Build(const ModelDescription& model, const v1::Plan& plan,
                            const BatchShape& batch);

  const std::vector<ParameterUnit>& units() const { return units_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  const std::vector<PoolSpec>& pools() const { return pools_; }
  // Chunks of unit u are chunks()[first_chunk(u)] to chunks()[first_chunk(u + 1) - 1].
  int64_t first_chunk(int64_t unit) const { return first_chunk_[unit]; }
  // Whether the unit's gradient travels as the batch's rows: an embedding's, unless the head's is the same one.
  bool gradient_by_row(int64_t unit) const {
    return units_[unit].kind == UnitKind::kEmbedding && !tied_embedding_;
  }
  bool resident(int64_t unit) const { return chunks_[first_chunk_[unit]].owner_rank >= 0; }
  // Compute reads the state itself: nothing is delivered. Several ranks deliver resident units to each other.
  bool used_in_place(int64_t unit) const { return resident(unit) && rank_count_ == 1; }
  ControlPage::Layout control_page() const;

  int rank_count() const { return rank_count_; }
  bool float32() const { return float32_; }
  int64_t weight_bytes() const { return float32_ ? 4 : 2; }       // Of one working weight.
  int64_t rest_block_bytes() const { return float32_ ? 32768 : 40960; }
  // Bytes of one element of a stored gradient partial: 2, or 4 with float32 or accumulation over 1.
  int64_t gradient_bytes() const { return gradient_bytes_; }
  v1::GradientReduction reduction() const { return reduction_; }
  // Gradients are summed between the devices, each rank a slice of every chunk (1/P of it, in rank order). An embedding's
  // rows are not: they differ from rank to rank.
  bool reduces_on_devices() const {
    return rank_count_ > 1 && reduction_ != v1::GRADIENT_REDUCTION_HOST;
  }
  // Partials of a chunk that an update adds up.
  int partial_count() const { return reduces_on_devices() ? 1 : rank_count_; }
  // Whether ranks hand weights or gradients to each other, not only through the host's pools.
  bool exchanges() const { return exchanges_between_ranks_; }
  // Delivery of a streamed unit: each rank copies its slice of every chunk in, and the ranks exchange them.
  bool sharded(int64_t unit) const { return sharded_[unit] != 0; }
  int64_t activation_bytes() const { return float32_ ? 4 : 2; }
  // Bytes of memory traffic of updating one element of the unit: its state read and written, and every rank's
  // partial read. Partials by row are not counted here.
  int64_t update_traffic_bytes(int64_t unit) const;

  // Working weights (masters with float32) and the interleaved rest of a chunk.
  Region weights(int64_t chunk) const { return weights_[chunk]; }
  Region rest(int64_t chunk) const { return rest_[chunk]; }
  // Where a partial of the chunk lies in step t. Streamed chunks of overlapped updates share a ring
  // of slots in store order; all else has its own place. REQUIRES: !gradient_by_row (see embedding_rows).
  Region gradient(int64_t chunk, int partial, int64_t step) const;
  // What `rank` stores of it: its partial, or its slice of the only one.
  Region gradient_of_rank(int64_t chunk, int rank, int64_t step) const;
  // FIFO number of a ring chunk in step t; -1 if the chunk does not pass the ring.
  int64_t ring_sequence(int64_t chunk, int64_t step) const;
  int64_t ring_slot_count() const { return ring_slot_count_; }
  int64_t ring_chunks_per_step() const { return ring_chunks_per_step_; }

  // The embedding's gradient of a rank (engine rules, section 8): the numbers of the rows in its batch, known before
  // the forward and kept for two steps, and the rows [max_rows, hidden] of partial type, which come last. Of a tied
  // embedding the numbers alone.
  struct RowGradient {
    Region region;
    int64_t max_rows = 0;
    int64_t row_set_bytes = 0;      // Of one step: int64 count, at byte 64 int32[max_rows].
    int64_t rows_offset_bytes = 0;  // Of the gradient's rows.
    static constexpr int64_t kRowNumbersOffset = 64;
    int64_t row_set_offset_bytes(int64_t step) const { return step % 2 * row_set_bytes; }
  };
  RowGradient embedding_rows(int rank) const { return embedding_rows_[rank]; }
  // Bytes of one element of those rows: 4 with float32, else 2.
  int64_t row_gradient_bytes() const { return float32_ ? 4 : 2; }

  // The boundary below layer `layer` of a rank; bytes 0 unless the plan keeps it on the host and the mixer
  // is replayed from it.
  Region boundary(int rank, int64_t layer) const { return boundaries_[rank][layer]; }
  // A resident chunk's copy at the cut of a checkpoint: weights, then rest.
  Region snapshot(int64_t chunk) const { return snapshots_[chunk]; }
  // Where `rank` puts its part of exchange number `sequence` for the others: an FP32 chunk. On CPU devices that reduce
  // between each other.
  Region exchange(int rank, int64_t sequence) const;

 private:
  std::vector<ParameterUnit> units_;
  std::vector<Chunk> chunks_;
  std::vector<PoolSpec> pools_;
  std::vector<int64_t> first_chunk_;
  std::vector<Region> weights_;
  std::vector<Region> rest_;
  std::vector<Region> gradients_;        // Of rank 0; ranks follow each other.
  std::vector<int64_t> ring_position_;   // In the step's store order; -1: not in the ring.
  std::vector<RowGradient> embedding_rows_;
  std::vector<std::vector<Region>> boundaries_;
  std::vector<Region> snapshots_;
  std::vector<char> sharded_;            // By unit.
  std::vector<Region> exchanges_;        // Of a rank.
  Region ring_;
  int64_t ring_slot_bytes_ = 0;          // Of one rank.
  int64_t ring_slot_count_ = 0;
  int64_t ring_chunks_per_step_ = 0;
  int64_t block_count_ = 0;
  int64_t expert_count_ = 0;
  int64_t gradient_bytes_ = 2;
  v1::GradientReduction reduction_ = v1::GRADIENT_REDUCTION_HOST;
  int rank_count_ = 1;
  bool float32_ = false;
  bool tied_embedding_ = false;
  bool exchanges_between_ranks_ = false;

  friend class SharedLayoutBuilder;
};

// The bases at which this process has mapped the job's pools.
struct PoolMap {
  std::vector<std::byte*> bases;
  std::byte* At(const Region& region) const { return bases[region.pool] + region.offset_bytes; }
};

// Numbers of the rows of `rank`'s batch in that step, where they lie: rising and unique. Valid from the rank's
// loss_known on until the step two later is granted.
std::span<const int32_t> RowSet(const SharedLayout& layout, const PoolMap& pools, int rank,
                                int64_t step);

}  // namespace oom
