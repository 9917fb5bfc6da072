// GroupedWeightGradient with wgmma and TMA. A block makes tiles of 128 x 256 of d: one warp copies
// stages of rows of x and y into a ring in shared memory, two warpgroups of 64 x 256 multiply.
// Two blocks, one below the other in d, form a cluster: each copies half of the y that both need
// into both. With less traffic from the L2 cache the tensor cores are the limit.
// A finished tile leaves through shared memory, in boxes that the copy engine writes or adds to d
// while the warp goes on. With `accumulate` the L2 cache adds; every element gets one addition a
// launch, so no order can change the result. Where a tile has so few rows that adding takes about
// as long as multiplying, what is added to comes into that cache meanwhile. The second warpgroup
// starts behind the first (hopper_head_start.cuh).

#include <algorithm>

#include "runtime/kernels/grouped_tiles.cuh"
#include "runtime/kernels/hopper_barrier.cuh"
#include "runtime/kernels/hopper_head_start.cuh"
#include "runtime/kernels/hopper_tensor_map.cuh"
#include "runtime/kernels/hopper_wgmma.cuh"
#include "runtime/kernels/launch.h"

namespace oom::grouped {
namespace {

using hopper::Summed;

constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kClusterBlocks = 2;
constexpr int kWarpgroup = 128;
constexpr int kMultiplyingWarps = 8;
constexpr int kThreads = kWarpgroup + kMultiplyingWarps * 32;
constexpr int kRowsOfProduct = 16;
constexpr int kHalfBarrier = 1;  // Named barriers 1 and 2, one a multiplying warpgroup.
constexpr int kHeadStartBarrier = 3;
constexpr int kHeadStartStages = 2;
constexpr int kPrefetchRows = 1280;  // 1,024 gain 3%, 2,048 would lose 4%.

// A stage: boxes of 64 rows and 64 columns of x and y.
constexpr int kStages = 4;
constexpr int kStageRows = 64;
constexpr int kBoxColumns = hopper::kBoxRowBytes / static_cast<int>(sizeof(__nv_bfloat16));
constexpr int kBoxBytes = kStageRows * hopper::kBoxRowBytes;
constexpr int kBoxesX = kTileM / kBoxColumns;
constexpr int kBoxesY = kTileN / kBoxColumns;
constexpr int kStageBytes = (kBoxesX + kBoxesY) * kBoxBytes;
constexpr int kRingBytes = kStages * kStageBytes;

// A warp's sums on their way to d: boxes of 16 rows and 32 columns, one filled while one leaves.
constexpr int kSumBoxRows = 16;
constexpr int kSumBoxColumns = hopper::kBoxRowBytes / static_cast<int>(sizeof(float));
constexpr int kSumBoxBytes = kSumBoxRows * hopper::kBoxRowBytes;
constexpr int kSumBoxesOfWarp = 2;
constexpr int kSumBytes = kMultiplyingWarps * kSumBoxesOfWarp * kSumBoxBytes;

int SharedBytes(int expert_count) {
  return kRingBytes + kSumBytes + static_cast<int>(2 * kStages * sizeof(uint64_t)) +
         expert_count * static_cast<int>(sizeof(uint16_t));
}

// What a block has in shared memory.
struct Shared {
  unsigned char* ring;
  unsigned char* sums;
  uint64_t* full;   // One arrival (the copying thread's) and the bytes of a stage.
  uint64_t* empty;  // One arrival of each multiplying warp of the cluster.
  uint16_t* expert_at;

  __device__ explicit Shared(unsigned char* dynamic) : ring(dynamic) {
    sums = ring + kRingBytes;
    full = reinterpret_cast<uint64_t*>(sums + kSumBytes);
    empty = full + kStages;
    expert_at = reinterpret_cast<uint16_t*>(empty + kStages);
  }
  __device__ unsigned char* BoxX(int stage, int box) const {
    return ring + stage * kStageBytes + box * kBoxBytes;
  }
  __device__ unsigned char* BoxY(int stage, int box) const { return BoxX(stage, kBoxesX + box); }
};

// The tiles of this block, one after the other. Those of a cluster are a column of d's tiles.
class BlockTiles {
 public:
  __device__ BlockTiles(const Problem& problem, const uint16_t* expert_at)
      : problem_(problem),
        order_(problem, kClusterBlocks * kTileM, kTileN),
        expert_at_(expert_at),
        rank_(hopper::ClusterRank()),
        next_(static_cast<int>(blockIdx.x) / kClusterBlocks) {}

  __device__ bool Next(Tile* tile) {
    if (next_ >= order_.count()) return false;
    *tile = order_.At(next_, expert_at_, problem_.row_end_E);
    tile->m = (tile->m * kClusterBlocks + rank_) * kTileM;
    tile->n *= kTileN;
    next_ += static_cast<int>(gridDim.x) / kClusterBlocks;
    return true;
  }
  __device__ int rank() const { return rank_; }

 private:
  const Problem& problem_;
  const TileOrder order_;
  const uint16_t* const expert_at_;
  const int rank_;
  int next_;
};

// Starts the copies of one stage. Rows after the expert's last come along; see ClearRows.
__device__ void CopyStage(const CUtensorMap& x_map, const CUtensorMap& y_map, const Shared& shared,
                          const Tile& tile, int row, int stage, int rank) {
  uint64_t* const full = &shared.full[stage];
  hopper::BarrierExpectBytes(full, kStageBytes);
  for (int box = 0; box < kBoxesX; ++box) {
    hopper::CopyBox(&x_map, shared.BoxX(stage, box), full, 0, row, tile.m + box * kBoxColumns);
  }
  constexpr int kBoxesEach = kBoxesY / kClusterBlocks;
  for (int i = 0; i < kBoxesEach; ++i) {
    const int box = rank * kBoxesEach + i;
    const int column = tile.n + box * kBoxColumns;
    constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;
    hopper::CopyBoxToBlocks(&y_map, shared.BoxY(stage, box), full, 0, row, column, kAllBlocks);
  }
}

// Starts bringing a share of the tile's part of d into the L2 cache.
__device__ void Prefetch(const CUtensorMap& d_tile_map, const Tile& tile, int stage, int stages) {
  constexpr int kBoxes = kTileN / kSumBoxColumns;
  for (int box = stage * kBoxes / stages; box < (stage + 1) * kBoxes / stages; ++box) {
    hopper::PrefetchBox(&d_tile_map, tile.expert, tile.m, tile.n + box * kSumBoxColumns);
  }
}

// The copying warp.
template <bool kAccumulate>
__device__ void CopyTiles(const CUtensorMap& x_map, const CUtensorMap& y_map,
                          const CUtensorMap& d_tile_map, const Problem& problem,
                          const Shared& shared) {
  BlockTiles tiles(problem, shared.expert_at);
  hopper::RingPosition<kStages> ring;
  Tile tile;
  const int lane = threadIdx.x % 32;
  while (tiles.Next(&tile)) {
    const int stages = (tile.rows + kStageRows - 1) / kStageRows;
    for (int i = 0; i < stages; ++i) {
      if (lane == 0) {
        hopper::BarrierWait(&shared.empty[ring.stage], ring.parity ^ 1);
        CopyStage(x_map, y_map, shared, tile, tile.first_row + i * kStageRows, ring.stage,
                  tiles.rank());
        if (kAccumulate && tile.rows <= kPrefetchRows) Prefetch(d_tile_map, tile, i, stages);
      }
      __syncwarp();
      ring.Advance();
    }
  }
}

// One warpgroup's half of the tiles.
class Multiplier {
 public:
  __device__ Multiplier(const Shared& shared, int half)
      : shared_(shared),
        half_(half),
        lane_(threadIdx.x % 32),
        head_start_(kHeadStartBarrier, /*leads=*/half == 0) {}

  // Adds the products of the tile's rows. REQUIRES: it has some. Calls `meanwhile` when those of
  // whole stages are under way.
  template <class Meanwhile>
  __device__ __forceinline__ void Multiply(const Tile& tile, float (&sum)[128],
                                           const Meanwhile& meanwhile) {
    head_start_.BeforeTile();
    const int whole_stages = tile.rows / kStageRows;
    int unreleased = -1;
    for (int i = 0; i < whole_stages; ++i) {
      hopper::BarrierWait(&shared_.full[ring_.stage], ring_.parity);
      hopper::ProductFence();
#pragma unroll
      for (int step = 0; step < kStageRows / kRowsOfProduct; ++step) {
        Product(sum, step);
      }
      hopper::CommitProducts();
      // The products of the stage before are done now; these go on.
      hopper::WaitForProducts<1>();
      if (unreleased >= 0) Release(unreleased);
      unreleased = ring_.stage;
      ring_.Advance();
      head_start_.AfterStage(i, whole_stages);
    }
    meanwhile();
    hopper::WaitForProducts<0>();
    hopper::SumsAreReady(sum);
    if (unreleased >= 0) Release(unreleased);
    const int rows_left = tile.rows % kStageRows;
    if (rows_left > 0) MultiplyPart(rows_left, sum);
    if (whole_stages == 0) head_start_.AfterStage(0, 1);
  }

 private:
  __device__ __forceinline__ void Product(float (&sum)[128], int step) const {
    const uint32_t offset = step * kRowsOfProduct * hopper::kBoxRowBytes;
    const uint32_t x = hopper::SharedAddress(shared_.BoxX(ring_.stage, half_)) + offset;
    const uint32_t y = hopper::SharedAddress(shared_.BoxY(ring_.stage, 0)) + offset;
    hopper::Product64x256x16<Summed::kSlow, Summed::kSlow>(
        sum, /*add=*/true, hopper::SlowFactor(x, kBoxBytes), hopper::SlowFactor(y, kBoxBytes));
  }

  // Adds the products of the stage's first `rows` rows.
  __device__ __forceinline__ void MultiplyPart(int rows, float (&sum)[128]) {
    hopper::BarrierWait(&shared_.full[ring_.stage], ring_.parity);
    ClearRows(rows);
#pragma unroll 1
    for (int step = 0; step * kRowsOfProduct < rows; ++step) {
      hopper::ProductFence();
      Product(sum, step);
      hopper::CommitProducts();
      hopper::WaitForProducts<0>();
      hopper::SumsAreReady(sum);
    }
    Release(ring_.stage);
    ring_.Advance();
  }

  __device__ __forceinline__ void Release(int stage) const {
    __syncwarp();
    if (lane_ < kClusterBlocks) hopper::BarrierArriveAt(&shared_.empty[stage], lane_);
  }

  // Zeros the stage's rows from `first` to the end of the product that it falls into, which belong
  // to other experts. In y too: zero times NaN is NaN. Each warpgroup clears all that it reads;
  // that the other one writes the same zeros to y does no harm.
  __device__ void ClearRows(int first) const {
    const int last = (first + kRowsOfProduct - 1) / kRowsOfProduct * kRowsOfProduct;
    constexpr int kVectors = hopper::kBoxRowBytes / sizeof(uint4);
    const int vectors = (last - first) * kVectors;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroup; i < (1 + kBoxesY) * vectors; i += kWarpgroup) {
      const int box = i / vectors;
      unsigned char* const start = shared_.BoxX(ring_.stage, box == 0 ? half_ : kBoxesX + box - 1);
      reinterpret_cast<uint4*>(start + first * hopper::kBoxRowBytes)[i % vectors] =
          make_uint4(0, 0, 0, 0);
    }
    hopper::FenceAsyncProxy();
    hopper::NamedBarrierSync(kHalfBarrier + half_, kWarpgroup);
  }

  const Shared& shared_;
  const int half_;
  const int lane_;
  hopper::HeadStart<kHeadStartStages> head_start_;
  hopper::RingPosition<kStages> ring_;
};

// Writes or adds a warp's part of a tile, whose first element is (row, column) of d[expert].
template <bool kAccumulate>
__device__ __forceinline__ void StoreSums(const float (&sum)[128], const CUtensorMap& d_map,
                                          unsigned char* boxes, int expert, int row, int column) {
  const int lane = threadIdx.x % 32;
  constexpr int kBoxes = kTileN / kSumBoxColumns;
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    unsigned char* const box = boxes + i % kSumBoxesOfWarp * kSumBoxBytes;
    if (lane == 0) hopper::WaitForBoxReads<kSumBoxesOfWarp - 1>();
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < kSumBoxColumns / 8; ++chunk) {
      const int piece = (2 * chunk + lane % 4 / 2) ^ (lane / 4);
      unsigned char* const first =
          box + lane / 4 * hopper::kBoxRowBytes + piece * 16 + lane % 2 * 8;
      const float* const part = sum + (i * (kSumBoxColumns / 8) + chunk) * 4;
      *reinterpret_cast<float2*>(first) = make_float2(part[0], part[1]);
      *reinterpret_cast<float2*>(first + 8 * hopper::kBoxRowBytes) = make_float2(part[2], part[3]);
    }
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) {
      if constexpr (kAccumulate) {
        hopper::AddBox(&d_map, box, expert, row, column + i * kSumBoxColumns);
      } else {
        hopper::StoreBox(&d_map, box, expert, row, column + i * kSumBoxColumns);
      }
      hopper::CommitBoxes();
    }
  }
}

template <bool kAccumulate>
__device__ __forceinline__ void MultiplyTiles(const CUtensorMap& d_map, const Problem& problem,
                                              const Shared& shared, int half) {
  BlockTiles tiles(problem, shared.expert_at);
  Multiplier multiplier(shared, half);
  const int warp = threadIdx.x / 32 - kWarpgroup / 32;
  unsigned char* const boxes = shared.sums + warp * kSumBoxesOfWarp * kSumBoxBytes;
  float sum[128];
  Tile tile, next;
  for (bool more = tiles.Next(&tile); more; tile = next) {
#pragma unroll
    for (float& element : sum) element = 0.0f;
    if (tile.rows > 0) {
      multiplier.Multiply(tile, sum, [&] { more = tiles.Next(&next); });
    } else {
      more = tiles.Next(&next);
      if (kAccumulate) continue;
    }
    const int row = tile.m + warp * kSumBoxRows;
    // The cluster's second tile may lie below d.
    if (row < problem.x_width) {
      StoreSums<kAccumulate>(sum, d_map, boxes, tile.expert, row, tile.n);
    }
  }
  if (threadIdx.x % 32 == 0) hopper::WaitForBoxes();
  __syncwarp();
}

template <bool kAccumulate>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedKernel(const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap y_map,
                  const __grid_constant__ CUtensorMap d_map,
                  const __grid_constant__ CUtensorMap d_tile_map, const Problem problem) {
  extern __shared__ __align__(hopper::kBoxAlignment) unsigned char dynamic[];
  if (hopper::SharedAddress(dynamic) % hopper::kBoxAlignment != 0) __trap();
  const Shared shared(dynamic);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::BarrierInit(&shared.full[stage], 1);
      hopper::BarrierInit(&shared.empty[stage], kClusterBlocks * kMultiplyingWarps);
    }
    hopper::BarrierInitFence();
  }
  SortExperts(problem, reinterpret_cast<uint64_t*>(shared.ring), shared.expert_at);
  hopper::FenceAsyncProxy();  // The ring was scratch.
  hopper::ClusterSync();

  // The registers of the copying warpgroup go to the others: 128 * (40 + 2 * 232) = 64,512.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    hopper::LowerRegisters<40>();
    if (warp == 0) CopyTiles<kAccumulate>(x_map, y_map, d_tile_map, problem, shared);
  } else {
    hopper::RaiseRegisters<232>();
    MultiplyTiles<kAccumulate>(d_map, problem, shared, warp / 4 - 1);
  }
  // No block ends while another of the cluster may still write to its ring or barriers.
  hopper::ClusterSync();
}

template <bool kAccumulate>
void Launch(const Problem& problem, const __nv_bfloat16* x_RM, const __nv_bfloat16* y_RN,
            cudaStream_t stream) {
  const int shared_bytes = SharedBytes(problem.expert_count);
  // CheckLaunch sees its result too.
  static_cast<void>(cudaFuncSetAttribute(
      GroupedKernel<kAccumulate>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  // Without rows nothing is copied, but a map must name something.
  const auto* anything = reinterpret_cast<const __nv_bfloat16*>(problem.d_EMN);
  const auto factor_map = [&](const __nv_bfloat16* matrix, int width) {
    const int64_t rows = std::max(problem.rows, 1);
    return hopper::MakeTensorMap(
        problem.rows > 0 ? matrix : anything,
        {.rows = rows, .columns = width, .row_stride = width, .matrix_stride = rows * width},
        kStageRows);
  };
  const CUtensorMap x_map = factor_map(x_RM, problem.x_width);
  const CUtensorMap y_map = factor_map(y_RN, problem.y_width);
  const auto d_boxes = [&](int box_rows) {
    return hopper::MakeTensorMap(problem.d_EMN,
                                 {.matrices = problem.expert_count,
                                  .rows = problem.x_width,
                                  .columns = problem.y_width,
                                  .row_stride = problem.d_row_stride,
                                  .matrix_stride = problem.d_expert_stride},
                                 box_rows);
  };
  const CUtensorMap d_map = d_boxes(kSumBoxRows), d_tile_map = d_boxes(kTileM);
  const TileOrder order(problem, kClusterBlocks * kTileM, kTileN);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kClusterBlocks, 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = kClusterBlocks * std::min(order.count(), MultiprocessorCount() / kClusterBlocks);
  launch.blockDim = kThreads;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  static_cast<void>(cudaLaunchKernelEx(&launch, GroupedKernel<kAccumulate>, x_map, y_map, d_map,
                                       d_tile_map, problem));
  CheckLaunch("GroupedWeightGradient, Hopper");
}

}  // namespace

void LaunchHopper(const Problem& problem, bool accumulate, const __nv_bfloat16* x_RM,
                  const __nv_bfloat16* y_RN, cudaStream_t stream) {
  if (accumulate) {
    Launch<true>(problem, x_RM, y_RN, stream);
  } else {
    Launch<false>(problem, x_RM, y_RN, stream);
  }
}

}  // namespace oom::grouped
