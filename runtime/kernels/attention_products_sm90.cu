// SoftmaxOfProducts and GradientsOfProducts with wgmma and TMA. As in grouped_product_sm90.cu one
// warp copies stages of 64 columns of both factors into a ring in shared memory and two warpgroups
// of 64 x 256 multiply; which tiles there are says attention_tiles.cuh. While one warpgroup turns
// scores into probabilities the other one has the tensor cores (hopper_head_start.cuh).

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "runtime/base/check.h"
#include "runtime/kernels/attention_products.h"
#include "runtime/kernels/attention_rows.cuh"
#include "runtime/kernels/attention_tiles.cuh"
#include "runtime/kernels/hopper_barrier.cuh"
#include "runtime/kernels/hopper_head_start.cuh"
#include "runtime/kernels/hopper_tensor_map.cuh"
#include "runtime/kernels/hopper_wgmma.cuh"
#include "runtime/kernels/launch.h"

namespace oom {
namespace {

using attention::BlockUnits;
using attention::GradientRows;
using attention::kClusterBlocks;
using attention::kOutBoxBytes;
using attention::kOutBoxesOfWarp;
using attention::kOutBoxRows;
using attention::kTileColumns;
using attention::kTileRows;
using attention::Problem;
using attention::SoftmaxRows;
using attention::Unit;
using hopper::Summed;

constexpr int kWarpgroup = 128;
constexpr int kMultiplyingWarps = 8;
constexpr int kThreads = kWarpgroup + kMultiplyingWarps * 32;
constexpr int kHalfRows = kTileRows / 2;  // A multiplying warpgroup's.
constexpr int kSumsOfProduct = 16;
constexpr int kHeadStartBarrier = 1;
constexpr int kHeadStartStages = 2;

// A stage: a box of rows for each warpgroup, a box of keys for each thread block of the cluster.
constexpr int kStages = 4;
constexpr int kStageSums = hopper::kBoxRowBytes / static_cast<int>(sizeof(__nv_bfloat16));
constexpr int kBoxKeys = kTileColumns / kClusterBlocks;
constexpr int kRowBoxBytes = kHalfRows * hopper::kBoxRowBytes;
constexpr int kKeyBoxBytes = kBoxKeys * hopper::kBoxRowBytes;
constexpr int kStageRowBytes = 2 * kRowBoxBytes;
constexpr int kStageBytes = kStageRowBytes + kClusterBlocks * kKeyBoxBytes;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kOutBytes = kMultiplyingWarps * kOutBoxesOfWarp * kOutBoxBytes;
constexpr int kSharedBytes =
    kRingBytes + kOutBytes + static_cast<int>(2 * kStages * sizeof(uint64_t));

// What a thread block has in shared memory.
struct Shared {
  unsigned char* ring;
  unsigned char* out;
  uint64_t* full;   // One arrival (the copying thread's) and the bytes of a stage.
  uint64_t* empty;  // One arrival of each multiplying warp of the cluster.

  __device__ explicit Shared(unsigned char* dynamic) : ring(dynamic) {
    out = ring + kRingBytes;
    full = reinterpret_cast<uint64_t*>(out + kOutBytes);
    empty = full + kStages;
  }
  __device__ unsigned char* Rows(int stage, int half) const {
    return ring + stage * kStageBytes + half * kRowBoxBytes;
  }
  __device__ unsigned char* Keys(int stage) const {
    return ring + stage * kStageBytes + kStageRowBytes;
  }
};

// The factors of a product.
struct FactorMaps {
  CUtensorMap rows;
  CUtensorMap keys;
};

// What both kernels take beside the problem; forward has one product and one result.
struct Maps {
  FactorMaps scores;
  FactorMaps dprobabilities;
  CUtensorMap probabilities;
  CUtensorMap dscores;
};

// Starts the copies of one stage: the summed index from `first` on, keys from the tile's on.
__device__ void CopyStage(const FactorMaps& maps, const Problem& problem, const Shared& shared,
                          const Unit& unit, int tile, int first, int stage, int rank) {
  uint64_t* const full = &shared.full[stage];
  hopper::BarrierExpectBytes(full, kStageBytes);
  for (int half = 0; half < 2; ++half) {
    hopper::CopyBox(&maps.rows, shared.Rows(stage, half), full, unit.group,
                    unit.row + half * kHalfRows, first);
  }
  const int key =
      static_cast<int>(problem.block.first_key) + tile * kTileColumns + rank * kBoxKeys;
  constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;
  hopper::CopyBoxToBlocks(&maps.keys, shared.Keys(stage) + rank * kKeyBoxBytes, full, 0, key,
                          unit.group * problem.head_size + first, kAllBlocks);
}

// The copying warp.
template <bool kGradients>
__device__ void CopyTiles(const Maps& maps, const Problem& problem, const Shared& shared) {
  BlockUnits units(problem);
  hopper::RingPosition<kStages> ring;
  Unit unit;
  const int lane = threadIdx.x % 32;
  const auto copy_product = [&](const FactorMaps& factors, int tile) {
    for (int first = 0; first < problem.head_size; first += kStageSums) {
      if (lane == 0) {
        hopper::BarrierWait(&shared.empty[ring.stage], ring.parity ^ 1);
        CopyStage(factors, problem, shared, unit, tile, first, ring.stage, units.rank());
      }
      __syncwarp();
      ring.Advance();
    }
  };
  while (units.Next(&unit)) {
    for (int tile = unit.first_seen; tile < unit.end_seen; ++tile) {
      copy_product(maps.scores, tile);
      if constexpr (kGradients) copy_product(maps.dprobabilities, tile);
    }
  }
}

// One warpgroup's half of the products.
class Multiplier {
 public:
  __device__ Multiplier(const Shared& shared, int half, int stages)
      : shared_(shared),
        half_(half),
        stages_(stages),
        lane_(threadIdx.x % 32),
        head_start_(kHeadStartBarrier, half == 0) {}

  // The product of the next stages.
  __device__ __forceinline__ void Multiply(float (&sum)[128]) {
    head_start_.BeforeTile();
    int unreleased = -1;
#pragma unroll 1
    for (int i = 0; i < stages_; ++i) {
      hopper::BarrierWait(&shared_.full[ring_.stage], ring_.parity);
      hopper::ProductFence();
      const uint32_t rows = hopper::SharedAddress(shared_.Rows(ring_.stage, half_));
      const uint32_t keys = hopper::SharedAddress(shared_.Keys(ring_.stage));
#pragma unroll
      for (int step = 0; step < kStageSums / kSumsOfProduct; ++step) {
        hopper::Product64x256x16<Summed::kFast, Summed::kFast>(
            sum, /*add=*/i > 0 || step > 0, hopper::FastFactor(rows, step),
            hopper::FastFactor(keys, step));
      }
      hopper::CommitProducts();
      // The products of the stage before are done now; these go on.
      hopper::WaitForProducts<1>();
      if (unreleased >= 0) Release(unreleased);
      unreleased = ring_.stage;
      ring_.Advance();
      head_start_.AfterStage(i, stages_);
    }
    hopper::WaitForProducts<0>();
    hopper::SumsAreReady(sum);
    Release(unreleased);
  }

 private:
  __device__ __forceinline__ void Release(int stage) const {
    __syncwarp();
    if (lane_ < kClusterBlocks) hopper::BarrierArriveAt(&shared_.empty[stage], lane_);
  }

  const Shared& shared_;
  const int half_;
  const int stages_;
  const int lane_;
  hopper::HeadStart<kHeadStartStages> head_start_;
  hopper::RingPosition<kStages> ring_;
};

template <bool kGradients>
__device__ __forceinline__ void MultiplyTiles(const Maps& maps, const Problem& problem,
                                              const Shared& shared, int half) {
  BlockUnits units(problem);
  Multiplier multiplier(shared, half, problem.head_size / kStageSums);
  const int warp = threadIdx.x / 32 - kWarpgroup / 32;
  unsigned char* const boxes = shared.out + warp * kOutBoxesOfWarp * kOutBoxBytes;
  float sum[128] = {};
  Unit unit;
  while (units.Next(&unit)) {
    const int row = unit.row + warp * kOutBoxRows;
    using RowsOfWarp = std::conditional_t<kGradients, GradientRows, SoftmaxRows>;
    RowsOfWarp rows(problem, unit.group, row, boxes);
    for (int tile = unit.first_tile; tile < min(unit.first_seen, unit.end_tile); ++tile) {
      rows.PassUnseen(tile);
    }
#pragma unroll 1
    for (int tile = unit.first_seen; tile < unit.end_seen; ++tile) {
      multiplier.Multiply(sum);
      rows.TakeScores(sum, tile, maps.probabilities);
      if constexpr (kGradients) {
        multiplier.Multiply(sum);
        rows.TakeGradients(sum, tile, maps.dscores);
      }
    }
    for (int tile = max(unit.first_seen, unit.end_seen); tile < unit.end_tile; ++tile) {
      rows.PassUnseen(tile);
    }
    if constexpr (!kGradients) rows.Finish();
  }
  if (threadIdx.x % 32 == 0) hopper::WaitForBoxes();
  __syncwarp();
}

template <bool kGradients>
__global__ void __launch_bounds__(kThreads, 1)
    ScoreProductKernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem problem) {
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
  hopper::ClusterSync();

  // The registers of the copying warpgroup go to the others: 128 * (40 + 2 * 232) = 64,512.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    hopper::LowerRegisters<40>();
    if (warp == 0) CopyTiles<kGradients>(maps, problem, shared);
  } else {
    hopper::RaiseRegisters<232>();
    MultiplyTiles<kGradients>(maps, problem, shared, warp / 4 - 1);
  }
  // No block ends while another of the cluster may still write to its ring or barriers.
  hopper::ClusterSync();
}

FactorMaps MapsOf(const Problem& problem, const ScoreProductSizes& sizes,
                  const ScoreFactors& factors) {
  const ScoreBlock& block = problem.block;
  const int64_t key_width = block.group_count * sizes.head_size;
  return {.rows = hopper::MakeTensorMap(factors.rows_GRd,
                                        {.matrices = block.group_count,
                                         .rows = block.rows,
                                         .columns = sizes.head_size,
                                         .row_stride = sizes.head_size,
                                         .matrix_stride = block.rows * sizes.head_size},
                                        kHalfRows),
          .keys = hopper::MakeTensorMap(factors.keys_TGd,
                                        {.rows = sizes.tokens,
                                         .columns = key_width,
                                         .row_stride = key_width,
                                         .matrix_stride = sizes.tokens * key_width},
                                        kBoxKeys)};
}

CUtensorMap ResultMap(const ScoreBlock& block, const __nv_bfloat16* result_GRC) {
  return hopper::MakeTensorMap(result_GRC,
                               {.matrices = block.group_count,
                                .rows = block.rows,
                                .columns = block.columns,
                                .row_stride = block.row_stride,
                                .matrix_stride = block.rows * block.row_stride},
                               kOutBoxRows);
}

Problem ProblemOf(const ScoreBlock& block, const ScoreProductSizes& sizes) {
  OOM_CHECK(block.group_count > 0 && block.heads_of_group > 0 && block.window >= 0);
  OOM_CHECK(block.rows > 0 && block.rows % block.heads_of_group == 0 &&
            block.group_count * block.rows <= INT32_MAX / 2);
  OOM_CHECK(block.columns > 0 && block.columns <= kScoreColumnsMax);
  OOM_CHECK(block.row_stride >= block.columns && block.row_stride % 8 == 0);
  OOM_CHECK(block.positions_T != nullptr && block.scale > 0.0f);
  OOM_CHECK(sizes.tokens > 0 && sizes.tokens <= INT32_MAX / 2);
  OOM_CHECK(sizes.head_size > 0 && sizes.head_size % kStageSums == 0);
  return {.block = block, .head_size = static_cast<int>(sizes.head_size)};
}

template <bool kGradients>
void Launch(const Maps& maps, const Problem& problem, const char* name, cudaStream_t stream) {
  // CheckLaunch sees its result too.
  static_cast<void>(cudaFuncSetAttribute(ScoreProductKernel<kGradients>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kSharedBytes));
  int device = 0, multiprocessors = 0;
  OOM_CHECK(cudaGetDevice(&device) == cudaSuccess);
  OOM_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) ==
            cudaSuccess);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kClusterBlocks, 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = kClusterBlocks * std::min(problem.units(), multiprocessors / kClusterBlocks);
  launch.blockDim = kThreads;
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  static_cast<void>(cudaLaunchKernelEx(&launch, ScoreProductKernel<kGradients>, maps, problem));
  CheckLaunch(name);
}

}  // namespace

void SoftmaxOfProducts(const ScoreBlock& block, const ScoreProductSizes& sizes,
                       const ScoreFactors& factors, bool first, __nv_bfloat16* probabilities_GRC,
                       const SoftmaxState& state, cudaStream_t stream) {
  Problem problem = ProblemOf(block, sizes);
  problem.tiles_of_unit = problem.tile_columns();  // A row's sums belong to one thread.
  problem.first = first;
  problem.state = state;
  problem.probabilities_GRC = probabilities_GRC;
  Maps maps = {};
  maps.scores = MapsOf(problem, sizes, factors);
  maps.probabilities = ResultMap(block, probabilities_GRC);
  Launch<false>(maps, problem, "SoftmaxOfProducts", stream);
}

void GradientsOfProducts(const ScoreBlock& block, const ScoreProductSizes& sizes,
                         const ProductGradientArguments& arguments, cudaStream_t stream) {
  Problem problem = ProblemOf(block, sizes);
  problem.tiles_of_unit = 1;
  problem.logsumexp_TN = arguments.logsumexp_TN;
  problem.delta_TN = arguments.delta_TN;
  problem.probabilities_GRC = arguments.probabilities_GRC;
  problem.dscores_GRC = arguments.dscores_GRC;
  const Maps maps = {.scores = MapsOf(problem, sizes, arguments.scores),
                     .dprobabilities = MapsOf(problem, sizes, arguments.dprobabilities),
                     .probabilities = ResultMap(block, arguments.probabilities_GRC),
                     .dscores = ResultMap(block, arguments.dscores_GRC)};
  Launch<true>(maps, problem, "GradientsOfProducts", stream);
}

}  // namespace oom
