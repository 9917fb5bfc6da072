// Which tile of d a block computes next: what both versions of GroupedWeightGradient share.
// Every expert has the same tiles, at a cost that grows with its rows. Blocks are persistent and
// block i takes tiles i, i + blocks, i + 2 * blocks, ... with the experts sorted by falling row
// count: then any two blocks' sums of costs differ by at most the largest tile, whatever the
// router does, without a counter in global memory. Tiles of one expert follow each other, so that
// its rows of x and y stay in the L2 cache.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/base/check.h"

namespace oom::grouped {

struct Problem {
  const int32_t* row_end_E;
  float* d_EMN;
  int64_t d_row_stride;
  int64_t d_expert_stride;
  int rows;
  int expert_count;
  int x_width;
  int y_width;
};

struct Tile {
  int expert;
  int first_row;
  int rows;
  int m;  // Tile row and column within d[expert].
  int n;
};

class TileOrder {
 public:
  __host__ __device__ TileOrder(const Problem& problem, int tile_m, int tile_n)
      : tiles_m_((problem.x_width + tile_m - 1) / tile_m),
        tiles_n_((problem.y_width + tile_n - 1) / tile_n),
        count_(problem.expert_count * tiles_m_ * tiles_n_) {}

  __host__ __device__ int count() const { return count_; }

  // `expert_at` is what SortExperts wrote.
  __device__ Tile At(int index, const uint16_t* expert_at, const int32_t* row_end_E) const {
    const int place = index / (tiles_m_ * tiles_n_);
    const int rest = index % (tiles_m_ * tiles_n_);
    Tile tile;
    tile.expert = expert_at[place];
    tile.first_row = tile.expert == 0 ? 0 : row_end_E[tile.expert - 1];
    tile.rows = row_end_E[tile.expert] - tile.first_row;
    // Bands of a few tile rows, column by column: tiles that run at the same time form a square,
    // which reads the least of x and y.
    const int band = rest / (kBandTiles * tiles_n_);
    const int in_band = rest % (kBandTiles * tiles_n_);
    const int band_height = min(kBandTiles, tiles_m_ - band * kBandTiles);
    tile.m = band * kBandTiles + in_band % band_height;
    tile.n = in_band / band_height;
    return tile;
  }

 private:
  static constexpr int kBandTiles = 8;

  int tiles_m_;
  int tiles_n_;
  int count_;
};

// Writes the experts in falling order of rows, equal ones in rising order of number. `key_scratch`
// holds expert_count elements. Called by the whole block; ends with a block barrier.
__device__ inline void SortExperts(const Problem& problem, uint64_t* key_scratch,
                                   uint16_t* expert_at) {
  const int count = problem.expert_count;
  for (int e = threadIdx.x; e < count; e += blockDim.x) {
    const int rows = problem.row_end_E[e] - (e == 0 ? 0 : problem.row_end_E[e - 1]);
    key_scratch[e] = (static_cast<uint64_t>(rows) << 32) | static_cast<uint32_t>(count - e);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < count; e += blockDim.x) {
    const uint64_t key = key_scratch[e];
    int place = 0;
    for (int other = 0; other < count; ++other) place += key_scratch[other] > key;
    expert_at[place] = static_cast<uint16_t>(e);
  }
  __syncthreads();
}

// How many blocks can run at once, one each.
inline int MultiprocessorCount() {
  int device = 0;
  int count = 0;
  OOM_CHECK(cudaGetDevice(&device) == cudaSuccess);
  OOM_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess);
  return count;
}

// The Hopper version; arguments are checked by GroupedWeightGradient.
void LaunchHopper(const Problem& problem, bool accumulate, const __nv_bfloat16* x_RM,
                  const __nv_bfloat16* y_RN, cudaStream_t stream);

}  // namespace oom::grouped
