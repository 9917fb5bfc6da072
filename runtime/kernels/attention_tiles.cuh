// How attention_products_sm90.cu divides a block of scores: tiles of 128 rows and 256 columns. Two
// thread blocks form a cluster and take tiles below each other, so that each copies half of the
// keys into both. A unit is a row of such pairs of tiles; in it only those are multiplied that any
// of the pair's rows sees.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/kernels/attention_products.h"
#include "runtime/kernels/hopper_barrier.cuh"

namespace oom::attention {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kClusterBlocks = 2;
constexpr int kPairRows = kClusterBlocks * kTileRows;

struct Problem {
  ScoreBlock block = {};
  int head_size = 0;
  int tiles_of_unit = 0;

  // Forward.
  bool first = false;
  SoftmaxState state = {};
  // Backward.
  const float* logsumexp_TN = nullptr;
  const float* delta_TN = nullptr;

  __nv_bfloat16* probabilities_GRC = nullptr;
  __nv_bfloat16* dscores_GRC = nullptr;

  __host__ __device__ int tile_columns() const {
    return static_cast<int>((block.columns + kTileColumns - 1) / kTileColumns);
  }
  __host__ __device__ int pairs() const {
    return static_cast<int>((block.rows + kPairRows - 1) / kPairRows);
  }
  __host__ __device__ int units_of_pair() const {
    return (tile_columns() + tiles_of_unit - 1) / tiles_of_unit;
  }
  __host__ __device__ int units() const {
    return static_cast<int>(block.group_count) * pairs() * units_of_pair();
  }
};

// The columns that a row sees: [first, end), none where end is not above first. Neither falls from
// a row to the next.
struct Seen {
  int first;
  int end;
};
__device__ inline Seen SeenBy(const ScoreBlock& block, int row) {
  const int64_t token = block.first_token + row / block.heads_of_group;
  int64_t before = block.positions_T[token];
  if (block.window > 0) before = min(before, block.window - 1);
  return {static_cast<int>(max(token - before - block.first_key, int64_t{0})),
          static_cast<int>(max(min(token + 1 - block.first_key, block.columns), int64_t{0}))};
}

struct Unit {
  int group;
  int row;         // The first one of this thread block's tiles.
  int first_tile;  // Of columns.
  int end_tile;
  int first_seen;  // Tiles [first_seen, end_seen) of these are multiplied.
  int end_seen;
};

// The units of this thread block, one after the other.
class BlockUnits {
 public:
  __device__ explicit BlockUnits(const Problem& problem)
      : problem_(problem),
        rank_(hopper::ClusterRank()),
        next_(static_cast<int>(blockIdx.x) / kClusterBlocks) {}

  __device__ bool Next(Unit* unit) {
    if (next_ >= problem_.units()) return false;
    const int pairs = problem_.pairs();
    const int pair = next_ % pairs;
    const int part = next_ / pairs % problem_.units_of_pair();
    unit->group = next_ / pairs / problem_.units_of_pair();
    unit->row = pair * kPairRows + rank_ * kTileRows;
    unit->first_tile = part * problem_.tiles_of_unit;
    unit->end_tile = min(unit->first_tile + problem_.tiles_of_unit, problem_.tile_columns());
    const int first_row = pair * kPairRows;
    const int end_row = min(first_row + kPairRows, static_cast<int>(problem_.block.rows));
    unit->first_seen = SeenBy(problem_.block, first_row).first / kTileColumns;
    const int end = SeenBy(problem_.block, end_row - 1).end;
    unit->end_seen = min((end + kTileColumns - 1) / kTileColumns, unit->end_tile);
    unit->first_seen = max(unit->first_seen, unit->first_tile);
    next_ += static_cast<int>(gridDim.x) / kClusterBlocks;
    return true;
  }
  __device__ int rank() const { return rank_; }

 private:
  const Problem& problem_;
  const int rank_;
  int next_;
};

}  // namespace oom::attention
