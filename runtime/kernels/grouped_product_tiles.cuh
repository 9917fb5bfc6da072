// Which tile of y a block computes next: tiles of kTileRows rows of one expert and kTileColumns
// columns. The two blocks of a cluster take tiles that share a factor, so that each needs to copy
// only half of it: two tiles below each other have the same columns of w. Where an expert has an
// odd number of tile rows, the last one goes in pairs side by side, which have the same rows of x.
// All tiles cost the same, so clusters take pairs i, i + clusters, i + 2 * clusters, ...; those of
// an expert follow each other, so that its rows and its weight stay in the L2 cache.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/kernels/hopper_barrier.cuh"

namespace oom::grouped_product {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kClusterBlocks = 2;

struct Problem {
  const int32_t* row_end_E;
  __nv_bfloat16* y_RN;
  int rows;
  int expert_count;
  int x_width;
  int y_width;

  __host__ __device__ int tile_columns() const {
    return (y_width + kTileColumns - 1) / kTileColumns;
  }
};

struct Tile {
  int expert;
  int row;              // The first one, of x and y.
  int rows;             // Of this expert from there on; 0: only the other block has a tile.
  int column;           // The first one, of y.
  bool shared_columns;  // With the cluster's other block; otherwise the rows are shared.
};

__device__ inline int TileRowsOf(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// By expert, how many pairs it and those before it have. Called by one warp.
__device__ inline void CountPairs(const Problem& problem, int* pair_end) {
  const int lane = threadIdx.x % 32;
  const int tile_columns = problem.tile_columns();
  int before = 0;
  for (int first = 0; first < problem.expert_count; first += 32) {
    const int e = first + lane;
    int pairs = 0;
    if (e < problem.expert_count) {
      const int rows = problem.row_end_E[e] - (e == 0 ? 0 : problem.row_end_E[e - 1]);
      const int tile_rows = TileRowsOf(rows);
      pairs = tile_rows / 2 * tile_columns + tile_rows % 2 * ((tile_columns + 1) / 2);
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int lower = __shfl_up_sync(~0u, pairs, offset);
      if (lane >= offset) pairs += lower;
    }
    if (e < problem.expert_count) pair_end[e] = before + pairs;
    before += __shfl_sync(~0u, pairs, 31);
  }
}

// The tiles of this block, one after the other. `pair_end` is what CountPairs wrote.
class BlockTiles {
 public:
  __device__ BlockTiles(const Problem& problem, const int* pair_end)
      : problem_(problem),
        pair_end_(pair_end),
        rank_(hopper::ClusterRank()),
        next_(static_cast<int>(blockIdx.x) / kClusterBlocks) {}

  __device__ bool Next(Tile* tile) {
    if (next_ >= pair_end_[problem_.expert_count - 1]) return false;
    while (next_ >= pair_end_[expert_]) ++expert_;
    const int first_row = expert_ == 0 ? 0 : problem_.row_end_E[expert_ - 1];
    const int rows = problem_.row_end_E[expert_] - first_row;
    const int place = next_ - (expert_ == 0 ? 0 : pair_end_[expert_ - 1]);
    const int tile_rows = TileRowsOf(rows);
    const int tile_columns = problem_.tile_columns();
    const int pair_rows = tile_rows / 2;
    int m, n;
    tile->shared_columns = place < pair_rows * tile_columns;
    if (tile->shared_columns) {
      // Bands of a few pairs, column by column: what runs at the same time forms a square, which
      // reads the least of x and w.
      const int band = place / (kBandPairs * tile_columns);
      const int in_band = place % (kBandPairs * tile_columns);
      const int band_height = min(kBandPairs, pair_rows - band * kBandPairs);
      m = 2 * (band * kBandPairs + in_band % band_height) + rank_;
      n = in_band / band_height;
    } else {
      m = tile_rows - 1;
      n = 2 * (place - pair_rows * tile_columns) + rank_;
    }
    tile->expert = expert_;
    tile->row = first_row + m * kTileRows;
    tile->rows = n < tile_columns ? rows - m * kTileRows : 0;
    tile->column = n * kTileColumns;
    next_ += static_cast<int>(gridDim.x) / kClusterBlocks;
    return true;
  }
  __device__ int rank() const { return rank_; }

 private:
  static constexpr int kBandPairs = 8;

  const Problem& problem_;
  const int* const pair_end_;
  const int rank_;
  int next_;
  int expert_ = 0;
};

}  // namespace oom::grouped_product
