#include "runtime/base/check.h"
#include "runtime/kernels/expert_groups.h"
#include "runtime/kernels/launch.h"

namespace oom {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kMostExperts = 512;
constexpr int kMostChoices = 16;
// A tile is what one block sorts: whole tokens, at most this many pairs, a run of them a warp.
constexpr int kTilePairs = 2048;
constexpr int kSteps = kTilePairs / kThreads;
static_assert(kMostExperts <= kThreads, "a block scans one expert a thread");

int64_t TilePairs(const ExpertGroupShape& shape) {
  return kTilePairs / shape.experts_per_token * shape.experts_per_token;
}

int64_t PairCount(const ExpertGroupShape& shape) {
  return shape.token_count * shape.experts_per_token;
}

int64_t TileCount(const ExpertGroupShape& shape) {
  return (PairCount(shape) + TilePairs(shape) - 1) / TilePairs(shape);
}

// count_EB[e, b] = pairs of tile b that chose expert e.
__global__ void __launch_bounds__(kThreads)
    HistogramKernel(const int32_t* __restrict__ expert_TK, int64_t pairs, int tile_pairs,
                    int experts, int32_t* __restrict__ count_EB) {
  __shared__ int counts[kMostExperts];
  for (int e = threadIdx.x; e < experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tile_pairs;
  const int64_t last = min(pairs, first + tile_pairs);
  for (int64_t pair = first + threadIdx.x; pair < last; pair += kThreads) {
    atomicAdd(&counts[expert_TK[pair]], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    count_EB[static_cast<int64_t>(e) * gridDim.x + blockIdx.x] = counts[e];
  }
}

__device__ int WarpInclusiveSum(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(kWholeWarp, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// One warp an expert: count_EB becomes the pairs of the expert in earlier tiles, total_E all of
// them.
__global__ void __launch_bounds__(32)
    TileOffsetKernel(int64_t tiles, int32_t* __restrict__ count_EB, int32_t* __restrict__ total_E) {
  constexpr int kPerLane = 4;
  int32_t* count_B = count_EB + blockIdx.x * tiles;
  const int lane = threadIdx.x;
  int sum = 0;
  for (int64_t first = 0; first < tiles; first += 32 * kPerLane) {
    int count[kPerLane];
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t tile = first + lane * kPerLane + i;
      count[i] = tile < tiles ? count_B[tile] : 0;
      own += count[i];
    }
    const int inclusive = WarpInclusiveSum(own, lane);
    int before = sum + inclusive - own;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t tile = first + lane * kPerLane + i;
      if (tile < tiles) count_B[tile] = before;
      before += count[i];
    }
    sum += __shfl_sync(kWholeWarp, inclusive, 31);
  }
  if (lane == 0) total_E[blockIdx.x] = sum;
}

// Of a thread's value, the sum over all threads before it.
__device__ int BlockExclusiveSum(int value, int* warp_sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int inclusive = WarpInclusiveSum(value, lane);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int before = inclusive - value;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  return before;
}

// Each token's rows, rising: a row's place is the number of the token's rows below it.
__device__ void WriteRowsOfTokens(const int* tile_rows, int tile_count, int choices,
                                  int32_t* rows_TK) {
  for (int at = threadIdx.x; at < tile_count; at += kThreads) {
    const int token_first = at / choices * choices;
    const int row = tile_rows[at];
    int lower = 0;
    for (int k = 0; k < choices; ++k) lower += tile_rows[token_first + k] < row ? 1 : 0;
    rows_TK[token_first + lower] = row;
  }
}

// Every pair's row, tile by tile.
__global__ void __launch_bounds__(kThreads)
    PlaceKernel(const int32_t* __restrict__ expert_TK, int64_t pairs, int tile_pairs, int choices,
                int experts, const int32_t* __restrict__ earlier_EB,
                const int32_t* __restrict__ total_E, ExpertGroupArrays groups) {
  extern __shared__ int shared[];
  int* next_WE = shared;  // Per warp: pairs of each expert, then its next row.
  int* tile_rows = next_WE + kWarps * experts;  // Row of each pair of the tile.
  __shared__ int warp_sums[kWarps];
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  for (int i = thread; i < kWarps * experts; i += kThreads) next_WE[i] = 0;

  const int total = thread < experts ? total_E[thread] : 0;
  const int expert_first = BlockExclusiveSum(total, warp_sums);  // Ends the zeroing too.
  if (blockIdx.x == 0) {
    if (thread < experts) groups.first_row_E1[thread] = expert_first;
    if (thread == 0) groups.first_row_E1[experts] = static_cast<int32_t>(pairs);
  }

  // A warp's run of the tile, 32 pairs a step: lanes with the same expert find each other.
  const int64_t tile_first = static_cast<int64_t>(blockIdx.x) * tile_pairs;
  const int tile_count =
      static_cast<int>(min(static_cast<int64_t>(tile_pairs), pairs - tile_first));
  int* next_E = next_WE + warp * experts;
  int expert[kSteps];
  unsigned peers[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = (warp * kSteps + step) * 32 + lane;
    expert[step] = at < tile_count ? expert_TK[tile_first + at] : -1;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    peers[step] = __match_any_sync(kWholeWarp, expert[step]);
    if (expert[step] >= 0 && lane == __ffs(peers[step]) - 1) {
      next_E[expert[step]] += __popc(peers[step]);
    }
    __syncwarp();
  }
  __syncthreads();

  if (thread < experts) {
    int next = expert_first + earlier_EB[static_cast<int64_t>(thread) * gridDim.x + blockIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const int count = next_WE[w * experts + thread];
      next_WE[w * experts + thread] = next;
      next += count;
    }
  }
  __syncthreads();

#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool valid = expert[step] >= 0;
    const int at = (warp * kSteps + step) * 32 + lane;
    const int first = valid ? next_E[expert[step]] : 0;
    __syncwarp();
    if (valid) {
      const int row = first + __popc(peers[step] & ((1u << lane) - 1));
      const int pair = static_cast<int>(tile_first) + at;
      groups.pair_R[row] = pair;
      groups.token_R[row] = pair / choices;
      tile_rows[at] = row;
      if (lane == __ffs(peers[step]) - 1) next_E[expert[step]] = first + __popc(peers[step]);
    }
    __syncwarp();
  }
  __syncthreads();

  WriteRowsOfTokens(tile_rows, tile_count, choices, groups.rows_TK + tile_first);
}

__global__ void PairsToRowsKernel(const int32_t* __restrict__ pair_R, int64_t rows,
                                  const float* __restrict__ value_TK, float* __restrict__ value_R) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < rows) value_R[row] = value_TK[pair_R[row]];
}

__global__ void RowsToPairsKernel(const int32_t* __restrict__ pair_R, int64_t rows,
                                  const float* __restrict__ value_R, float* __restrict__ value_TK) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < rows) value_TK[pair_R[row]] = value_R[row];
}

// One block an expert: strided sums of its threads, then a tree of them.
__global__ void __launch_bounds__(kThreads)
    ProductsByExpertKernel(const int32_t* __restrict__ first_row_E1, const float* __restrict__ a_R,
                           const float* __restrict__ b_R, float* sum_E) {
  __shared__ float sums[kThreads];
  const int end = first_row_E1[blockIdx.x + 1];
  float sum = 0.0f;
  for (int row = first_row_E1[blockIdx.x] + static_cast<int>(threadIdx.x); row < end;
       row += kThreads) {
    sum += a_R[row] * b_R[row];
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sum_E[blockIdx.x] += sums[0];
}

void CheckShape(const ExpertGroupShape& shape) {
  OOM_CHECK(shape.token_count >= 0);
  OOM_CHECK(shape.expert_count > 0 && shape.expert_count <= kMostExperts);
  OOM_CHECK(shape.experts_per_token > 0 && shape.experts_per_token <= kMostChoices);
  OOM_CHECK(PairCount(shape) <= INT32_MAX);
}

unsigned RowBlocks(int64_t rows) { return static_cast<unsigned>((rows + kThreads - 1) / kThreads); }

}  // namespace

int64_t ExpertGroupScratchBytes(const ExpertGroupShape& shape) {
  CheckShape(shape);
  return (TileCount(shape) + 1) * shape.expert_count * static_cast<int64_t>(sizeof(int32_t));
}

void GroupRowsByExpert(const ExpertGroupShape& shape, const int32_t* expert_TK,
                       const ExpertGroupArrays& groups, void* scratch, cudaStream_t stream) {
  CheckShape(shape);
  const int experts = shape.expert_count;
  const int64_t pairs = PairCount(shape);
  if (pairs == 0) {
    static_cast<void>(
        cudaMemsetAsync(groups.first_row_E1, 0, (experts + 1) * sizeof(int32_t), stream));
    CheckLaunch("GroupRowsByExpert");
    return;
  }
  const int64_t tiles = TileCount(shape);
  const int tile_pairs = static_cast<int>(TilePairs(shape));
  int32_t* total_E = static_cast<int32_t*>(scratch);
  int32_t* count_EB = total_E + experts;
  const unsigned blocks = static_cast<unsigned>(tiles);
  HistogramKernel<<<blocks, kThreads, 0, stream>>>(expert_TK, pairs, tile_pairs, experts, count_EB);
  TileOffsetKernel<<<experts, 32, 0, stream>>>(tiles, count_EB, total_E);
  // At most 40 KiB, which needs no permission.
  const size_t shared_bytes = (kWarps * experts + kTilePairs) * sizeof(int);
  PlaceKernel<<<blocks, kThreads, shared_bytes, stream>>>(
      expert_TK, pairs, tile_pairs, shape.experts_per_token, experts, count_EB, total_E, groups);
  CheckLaunch("GroupRowsByExpert");
}

void PairsToRows(const int32_t* pair_R, int64_t row_count, const float* value_TK, float* value_R,
                 cudaStream_t stream) {
  if (row_count == 0) return;
  PairsToRowsKernel<<<RowBlocks(row_count), kThreads, 0, stream>>>(pair_R, row_count, value_TK,
                                                                   value_R);
  CheckLaunch("PairsToRows");
}

void RowsToPairs(const int32_t* pair_R, int64_t row_count, const float* value_R, float* value_TK,
                 cudaStream_t stream) {
  if (row_count == 0) return;
  RowsToPairsKernel<<<RowBlocks(row_count), kThreads, 0, stream>>>(pair_R, row_count, value_R,
                                                                   value_TK);
  CheckLaunch("RowsToPairs");
}

void AddProductsByExpert(const int32_t* first_row_E1, int expert_count, const float* a_R,
                         const float* b_R, float* sum_E, cudaStream_t stream) {
  OOM_CHECK(expert_count > 0);
  ProductsByExpertKernel<<<static_cast<unsigned>(expert_count), kThreads, 0, stream>>>(
      first_row_E1, a_R, b_R, sum_E);
  CheckLaunch("AddProductsByExpert");
}

}  // namespace oom
