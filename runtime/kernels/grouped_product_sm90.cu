// GroupedProduct with wgmma and TMA. A block makes tiles of 128 x 256 of y: one warp copies stages
// of 64 columns of x and as much of w into a ring in shared memory, two warpgroups of 64 x 256
// multiply. Two blocks form a cluster and copy what both need once, half each (see
// grouped_product_tiles.cuh).

#include <algorithm>

#include "runtime/base/check.h"
#include "runtime/kernels/grouped_product.h"
#include "runtime/kernels/grouped_product_tiles.cuh"
#include "runtime/kernels/hopper_barrier.cuh"
#include "runtime/kernels/hopper_tensor_map.cuh"
#include "runtime/kernels/hopper_wgmma.cuh"
#include "runtime/kernels/launch.h"

namespace oom {
namespace {

using grouped_product::BlockTiles;
using grouped_product::CountPairs;
using grouped_product::kClusterBlocks;
using grouped_product::kTileColumns;
using grouped_product::kTileRows;
using grouped_product::Problem;
using grouped_product::Tile;
using hopper::Summed;

constexpr int kWarpgroup = 128;
constexpr int kMultiplyingWarps = 8;
constexpr int kThreads = kWarpgroup + kMultiplyingWarps * 32;
constexpr int kHalfRows = kTileRows / 2;  // A multiplying warpgroup's.
constexpr int kSumsOfProduct = 16;

// A stage: a box of x for each half of the rows, and of w boxes of 64 rows (the summed index) and
// 64 columns or, transposed, of 128 rows and 64 columns (the summed index).
constexpr int kStages = 4;
constexpr int kBoxColumns = hopper::kBoxRowBytes / static_cast<int>(sizeof(__nv_bfloat16));
constexpr int kStageSums = kBoxColumns;
constexpr int kBoxXBytes = kHalfRows * hopper::kBoxRowBytes;
constexpr int kStageXBytes = 2 * kBoxXBytes;
constexpr int kStageWBytes = kTileColumns * kStageSums * static_cast<int>(sizeof(__nv_bfloat16));
constexpr int kStageBytes = kStageXBytes + kStageWBytes;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kBoxRowsW = kStageSums;
constexpr int kBoxRowsTransposedW = kTileColumns / kClusterBlocks;

// A warp's part of y on its way out: boxes of 16 rows and 64 columns, one filled while one leaves.
constexpr int kOutBoxRows = 16;
constexpr int kOutBoxBytes = kOutBoxRows * hopper::kBoxRowBytes;
constexpr int kOutBoxesOfWarp = 2;
constexpr int kOutBytes = kMultiplyingWarps * kOutBoxesOfWarp * kOutBoxBytes;

int SharedBytes(int expert_count) {
  return kRingBytes + kOutBytes + static_cast<int>(2 * kStages * sizeof(uint64_t)) +
         expert_count * static_cast<int>(sizeof(int));
}

// What a block has in shared memory.
struct Shared {
  unsigned char* ring;
  unsigned char* out;
  uint64_t* full;   // One arrival (the copying thread's) and the bytes of a stage.
  uint64_t* empty;  // One arrival of each multiplying warp of the cluster.
  int* pair_end;

  __device__ explicit Shared(unsigned char* dynamic) : ring(dynamic) {
    out = ring + kRingBytes;
    full = reinterpret_cast<uint64_t*>(out + kOutBytes);
    empty = full + kStages;
    pair_end = reinterpret_cast<int*>(empty + kStages);
  }
  __device__ unsigned char* X(int stage, int half) const {
    return ring + stage * kStageBytes + half * kBoxXBytes;
  }
  __device__ unsigned char* W(int stage) const { return ring + stage * kStageBytes + kStageXBytes; }
};

constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;

// Starts the copies of one stage: the summed index from `first` on.
template <bool kTransposed>
__device__ void CopyStage(const CUtensorMap& x_map, const CUtensorMap& w_map, const Shared& shared,
                          const Tile& tile, int first, int stage, int rank) {
  uint64_t* const full = &shared.full[stage];
  hopper::BarrierExpectBytes(full, kStageBytes);
  for (int half = 0; half < 2; ++half) {
    unsigned char* const box = shared.X(stage, half);
    const int row = tile.row + half * kHalfRows;
    if (tile.shared_columns) {
      hopper::CopyBox(&x_map, box, full, 0, row, first);
    } else if (half == rank) {
      hopper::CopyBoxToBlocks(&x_map, box, full, 0, row, first, kAllBlocks);
    }
  }
  constexpr int kBoxWidth = kTransposed ? kBoxRowsTransposedW : kBoxColumns;
  constexpr int kBoxes = kTileColumns / kBoxWidth;
  for (int i = 0; i < kBoxes; ++i) {
    unsigned char* const box = shared.W(stage) + i * (kStageWBytes / kBoxes);
    const int column = tile.column + i * kBoxWidth;
    const int row = kTransposed ? column : first;
    const int column_of_row = kTransposed ? first : column;
    if (!tile.shared_columns) {
      hopper::CopyBox(&w_map, box, full, tile.expert, row, column_of_row);
    } else if (i / (kBoxes / kClusterBlocks) == rank) {
      hopper::CopyBoxToBlocks(&w_map, box, full, tile.expert, row, column_of_row, kAllBlocks);
    }
  }
}

// The copying warp.
template <bool kTransposed>
__device__ void CopyTiles(const CUtensorMap& x_map, const CUtensorMap& w_map,
                          const Problem& problem, const Shared& shared) {
  BlockTiles tiles(problem, shared.pair_end);
  hopper::RingPosition<kStages> ring;
  Tile tile;
  const int lane = threadIdx.x % 32;
  while (tiles.Next(&tile)) {
    for (int first = 0; first < problem.x_width; first += kStageSums) {
      if (lane == 0) {
        hopper::BarrierWait(&shared.empty[ring.stage], ring.parity ^ 1);
        CopyStage<kTransposed>(x_map, w_map, shared, tile, first, ring.stage, tiles.rank());
      }
      __syncwarp();
      ring.Advance();
    }
  }
}

// One warpgroup's half of the tiles.
template <bool kTransposed>
class Multiplier {
 public:
  __device__ Multiplier(const Shared& shared, int half)
      : shared_(shared), half_(half), lane_(threadIdx.x % 32) {}

  // Sums the products of a tile's stages. Calls `meanwhile` when all are under way.
  template <class Meanwhile>
  __device__ __forceinline__ void Multiply(int stages, float (&sum)[128],
                                           const Meanwhile& meanwhile) {
    int unreleased = -1;
    for (int i = 0; i < stages; ++i) {
      hopper::BarrierWait(&shared_.full[ring_.stage], ring_.parity);
      hopper::ProductFence();
#pragma unroll
      for (int step = 0; step < kStageSums / kSumsOfProduct; ++step) {
        Product(sum, /*add=*/i > 0 || step > 0, step);
      }
      hopper::CommitProducts();
      // The products of the stage before are done now; these go on.
      hopper::WaitForProducts<1>();
      if (unreleased >= 0) Release(unreleased);
      unreleased = ring_.stage;
      ring_.Advance();
    }
    meanwhile();
    hopper::WaitForProducts<0>();
    hopper::SumsAreReady(sum);
    if (unreleased >= 0) Release(unreleased);
  }

  // Passes over stages in which this half has no rows.
  __device__ void Skip(int stages) {
    for (int i = 0; i < stages; ++i) {
      hopper::BarrierWait(&shared_.full[ring_.stage], ring_.parity);
      Release(ring_.stage);
      ring_.Advance();
    }
  }

 private:
  __device__ __forceinline__ void Product(float (&sum)[128], bool add, int step) const {
    const uint32_t x = hopper::SharedAddress(shared_.X(ring_.stage, half_));
    const uint32_t w = hopper::SharedAddress(shared_.W(ring_.stage));
    if constexpr (kTransposed) {
      hopper::Product64x256x16<Summed::kFast, Summed::kFast>(sum, add, hopper::FastFactor(x, step),
                                                             hopper::FastFactor(w, step));
    } else {
      constexpr uint32_t kStepBytes = kSumsOfProduct * hopper::kBoxRowBytes;
      constexpr uint32_t kBoxBytes = kBoxRowsW * hopper::kBoxRowBytes;
      hopper::Product64x256x16<Summed::kFast, Summed::kSlow>(
          sum, add, hopper::FastFactor(x, step),
          hopper::SlowFactor(w + step * kStepBytes, kBoxBytes));
    }
  }

  __device__ __forceinline__ void Release(int stage) const {
    __syncwarp();
    if (lane_ < kClusterBlocks) hopper::BarrierArriveAt(&shared_.empty[stage], lane_);
  }

  const Shared& shared_;
  const int half_;
  const int lane_;
  hopper::RingPosition<kStages> ring_;
};

__device__ __forceinline__ uint32_t Rounded(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Writes the first `rows` of a box of y by ordinary stores: what follows belongs to others.
__device__ __forceinline__ void StoreRows(const unsigned char* box, int rows, __nv_bfloat16* y,
                                          int64_t y_width, int columns) {
  constexpr int kPieces = hopper::kBoxRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < rows * kPieces; i += 32) {
    const int row = i / kPieces, piece = i % kPieces;
    if (piece * 8 >= columns) continue;
    *reinterpret_cast<uint4*>(y + row * y_width + piece * 8) =
        *reinterpret_cast<const uint4*>(box + row * hopper::kBoxRowBytes + (piece ^ row % 8) * 16);
  }
}

// Writes a warp's part of a tile: `rows`, perhaps more than it has, from (row, column) of y on.
__device__ __forceinline__ void StoreSums(const float (&sum)[128], const CUtensorMap& y_map,
                                          const Problem& problem, unsigned char* boxes, int row,
                                          int rows, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTileColumns / kBoxColumns; ++i) {
    const int first_column = column + i * kBoxColumns;
    if (first_column >= problem.y_width) continue;
    unsigned char* const box = boxes + i % kOutBoxesOfWarp * kOutBoxBytes;
    // The tile before may have ended with any of the boxes.
    if (i == 0 && lane == 0) hopper::WaitForBoxReads<0>();
    if (i >= kOutBoxesOfWarp && lane == 0) hopper::WaitForBoxReads<kOutBoxesOfWarp - 1>();
    __syncwarp();
    const int box_row = lane % 16;
#pragma unroll
    for (int two = 0; two < kBoxColumns / 16; ++two) {
      const float* const part = sum + (i * (kBoxColumns / 8) + two * 2) * 4;
      const int piece = (two * 2 + lane / 16) ^ (box_row % 8);
      hopper::StoreMatrices(box + box_row * hopper::kBoxRowBytes + piece * 16,
                            {Rounded(part[0], part[1]), Rounded(part[2], part[3]),
                             Rounded(part[4], part[5]), Rounded(part[6], part[7])});
    }
    if (rows >= kOutBoxRows) {
      hopper::FenceAsyncProxy();
      __syncwarp();
      if (lane == 0) {
        hopper::StoreBox(&y_map, box, 0, row, first_column);
        hopper::CommitBoxes();
      }
    } else {
      __syncwarp();
      StoreRows(box, rows, problem.y_RN + int64_t{row} * problem.y_width + first_column,
                problem.y_width, problem.y_width - first_column);
      __syncwarp();
    }
  }
}

template <bool kTransposed>
__device__ __forceinline__ void MultiplyTiles(const CUtensorMap& y_map, const Problem& problem,
                                              const Shared& shared, int half) {
  BlockTiles tiles(problem, shared.pair_end);
  Multiplier<kTransposed> multiplier(shared, half);
  const int warp = threadIdx.x / 32 - kWarpgroup / 32;
  unsigned char* const boxes = shared.out + warp * kOutBoxesOfWarp * kOutBoxBytes;
  const int stages = (problem.x_width + kStageSums - 1) / kStageSums;
  float sum[128] = {};
  Tile tile, next;
  for (bool more = tiles.Next(&tile); more; tile = next) {
    if (tile.rows <= half * kHalfRows) {
      multiplier.Skip(stages);
      more = tiles.Next(&next);
      continue;
    }
    multiplier.Multiply(stages, sum, [&] { more = tiles.Next(&next); });
    const int rows = tile.rows - warp * kOutBoxRows;
    if (rows > 0) {
      StoreSums(sum, y_map, problem, boxes, tile.row + warp * kOutBoxRows, rows, tile.column);
    }
  }
  if (threadIdx.x % 32 == 0) hopper::WaitForBoxes();
  __syncwarp();
}

template <bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedProductKernel(const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ CUtensorMap w_map,
                         const __grid_constant__ CUtensorMap y_map, const Problem problem) {
  extern __shared__ __align__(hopper::kBoxAlignment) unsigned char dynamic[];
  if (hopper::SharedAddress(dynamic) % hopper::kBoxAlignment != 0) __trap();
  const Shared shared(dynamic);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 0) CountPairs(problem, shared.pair_end);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::BarrierInit(&shared.full[stage], 1);
      hopper::BarrierInit(&shared.empty[stage], kClusterBlocks * kMultiplyingWarps);
    }
    hopper::BarrierInitFence();
  }
  hopper::ClusterSync();

  // The registers of the copying warpgroup go to the others: 128 * (40 + 2 * 232) = 64,512.
  if (warp < 4) {
    hopper::LowerRegisters<40>();
    if (warp == 0) CopyTiles<kTransposed>(x_map, w_map, problem, shared);
  } else {
    hopper::RaiseRegisters<232>();
    MultiplyTiles<kTransposed>(y_map, problem, shared, warp / 4 - 1);
  }
  // No block ends while another of the cluster may still write to its ring or barriers.
  hopper::ClusterSync();
}

template <bool kTransposed>
void Launch(const Problem& problem, const __nv_bfloat16* x_RK, const __nv_bfloat16* w,
            cudaStream_t stream) {
  const int shared_bytes = SharedBytes(problem.expert_count);
  // CheckLaunch sees its result too.
  static_cast<void>(cudaFuncSetAttribute(GroupedProductKernel<kTransposed>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         shared_bytes));
  const int64_t k = problem.x_width, n = problem.y_width;
  const auto row_map = [&](const __nv_bfloat16* rows, int64_t width, int box_rows) {
    return hopper::MakeTensorMap(rows,
                                 {.rows = problem.rows,
                                  .columns = width,
                                  .row_stride = width,
                                  .matrix_stride = problem.rows * width},
                                 box_rows);
  };
  const CUtensorMap x_map = row_map(x_RK, k, kHalfRows);
  const CUtensorMap y_map = row_map(problem.y_RN, n, kOutBoxRows);
  const CUtensorMap w_map = hopper::MakeTensorMap(w,
                                                  {.matrices = problem.expert_count,
                                                   .rows = kTransposed ? n : k,
                                                   .columns = kTransposed ? k : n,
                                                   .row_stride = kTransposed ? k : n,
                                                   .matrix_stride = k * n},
                                                  kTransposed ? kBoxRowsTransposedW : kBoxRowsW);
  int device = 0, multiprocessors = 0;
  OOM_CHECK(cudaGetDevice(&device) == cudaSuccess);
  OOM_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) ==
            cudaSuccess);
  const int64_t most_pairs =
      (problem.rows / kTileRows + problem.expert_count) * int64_t{problem.tile_columns()};
  OOM_CHECK(most_pairs <= INT32_MAX / 2);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kClusterBlocks, 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = kClusterBlocks * static_cast<unsigned>(std::min<int64_t>(
                                        most_pairs, multiprocessors / kClusterBlocks));
  launch.blockDim = kThreads;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  static_cast<void>(
      cudaLaunchKernelEx(&launch, GroupedProductKernel<kTransposed>, x_map, w_map, y_map, problem));
  CheckLaunch("GroupedProduct");
}

bool Aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

void GroupedProduct(const GroupedProductShape& shape, const __nv_bfloat16* x_RK,
                    const __nv_bfloat16* w, const int32_t* row_end_E, __nv_bfloat16* y_RN,
                    cudaStream_t stream) {
  if (shape.rows == 0 || shape.expert_count == 0 || shape.y_width == 0) return;
  OOM_CHECK(shape.rows > 0 && shape.rows <= INT32_MAX / 2);
  OOM_CHECK(shape.expert_count > 0 && shape.expert_count <= kGroupedProductExpertsMax);
  OOM_CHECK(shape.x_width > 0 && shape.x_width % 8 == 0 && shape.x_width <= INT32_MAX / 2);
  OOM_CHECK(shape.y_width > 0 && shape.y_width % 8 == 0 && shape.y_width <= INT32_MAX / 2);
  OOM_CHECK(Aligned16(x_RK) && Aligned16(w) && Aligned16(y_RN));
  const Problem problem = {.row_end_E = row_end_E,
                           .y_RN = y_RN,
                           .rows = static_cast<int>(shape.rows),
                           .expert_count = static_cast<int>(shape.expert_count),
                           .x_width = static_cast<int>(shape.x_width),
                           .y_width = static_cast<int>(shape.y_width)};
  if (shape.transposed) {
    Launch<true>(problem, x_RK, w, stream);
  } else {
    Launch<false>(problem, x_RK, w, stream);
  }
}

}  // namespace oom
