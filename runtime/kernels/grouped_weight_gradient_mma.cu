// GroupedWeightGradient with mma.sync, ldmatrix and cp.async, for every architecture from 80 on,
// and the choice between it and the Hopper version. A block of 4 warps makes tiles of 128 x 128 of
// d, 64 x 64 a warp; two blocks share a multiprocessor, so that one multiplies while the other one
// writes.
// A stage holds 32 rows of x and of y as they lie in memory, so the summed index is slow; ldmatrix
// transposes. The 16-byte pieces of row r are permuted by XOR with r % 8: the eight rows that an
// 8 x 8 matrix reads lie in different banks.

#include <algorithm>

#include "runtime/kernels/grouped_tiles.cuh"
#include "runtime/kernels/grouped_weight_gradient.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/mma_instructions.cuh"

namespace oom {
namespace {

using grouped::Problem;
using grouped::Tile;
using grouped::TileOrder;
using internal::CommitCopies;
using internal::CopyPieceAsync;
using internal::LoadMatricesTransposed;
using internal::MultiplyAddBfloat16;
using internal::WaitForCopies;

constexpr int kTileWidth = 128;  // Of both x's and y's columns.
constexpr int kWarpWidth = 64;
constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kStageRows = 32;
constexpr int kStages = 3;
constexpr int kRowsOfProduct = 16;
constexpr int kPieceColumns = 8;  // 16 bytes.
constexpr int kRowPieces = kTileWidth / kPieceColumns;
constexpr int kFactorBytes = kStageRows * kTileWidth * 2;
constexpr int kStageBytes = 2 * kFactorBytes;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kBlocksM = kWarpWidth / 16;  // A warp's products: 16 rows of d by 8 columns.
constexpr int kBlocksN = kWarpWidth / 8;

__device__ __forceinline__ int PieceOffset(int row, int piece) {
  return (row * kRowPieces + (piece ^ (row % 8))) * 16;
}

// One thread's part of copying a factor's stages: the same piece of every eighth row.
class FactorCopy {
 public:
  __device__ FactorCopy(const __nv_bfloat16* matrix, int width, const Tile& tile, int column)
      : row_(threadIdx.x / kRowPieces),
        piece_(threadIdx.x % kRowPieces),
        rows_(tile.rows),
        row_elements_(width),
        fits_(column + piece_ * kPieceColumns < width),
        matrix_(matrix),
        source_(matrix + static_cast<int64_t>(tile.first_row) * width + column +
                piece_ * kPieceColumns) {}

  __device__ __forceinline__ void Start(int first_row, uint32_t factor) const {
#pragma unroll
    for (int i = 0; i < kStageRows; i += kThreads / kRowPieces) {
      const int row = first_row + row_ + i;
      const bool valid = fits_ && row < rows_;
      const __nv_bfloat16* source = source_ + static_cast<int64_t>(row) * row_elements_;
      CopyPieceAsync(factor + PieceOffset(row_ + i, piece_), valid ? source : matrix_, valid);
    }
  }

 private:
  const int row_;
  const int piece_;
  const int rows_;
  const int64_t row_elements_;
  const bool fits_;
  const __nv_bfloat16* const matrix_;
  const __nv_bfloat16* const source_;
};

using Sums = float[kBlocksM][kBlocksN * 4];

// A warp's products of one stage.
__device__ __forceinline__ void MultiplyStage(Sums& sums, uint32_t stage, int warp_m, int warp_n) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kStageRows; first += kRowsOfProduct) {
    // The order of a product's operands: x's two 8-column halves, then the other eight rows; y's
    // two halves of the rows, then the next eight columns.
    uint32_t x[kBlocksM][4];
    const int x_row = first + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int block = 0; block < kBlocksM; ++block) {
      const int piece = (warp_m + block * 16) / kPieceColumns + lane / 8 % 2;
      LoadMatricesTransposed(x[block], stage + PieceOffset(x_row, piece));
    }
    const int y_row = first + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int pair = 0; pair < kBlocksN / 2; ++pair) {
      uint32_t y[4];
      const int piece = (warp_n + pair * 16) / kPieceColumns + lane / 16;
      LoadMatricesTransposed(y, stage + kFactorBytes + PieceOffset(y_row, piece));
#pragma unroll
      for (int block = 0; block < kBlocksM; ++block) {
        MultiplyAddBfloat16(&sums[block][pair * 8], x[block], y[0], y[1]);
        MultiplyAddBfloat16(&sums[block][pair * 8 + 4], x[block], y[2], y[3]);
      }
    }
  }
}

// Sums the tile's rows; all threads of the block.
__device__ __forceinline__ void MultiplyTile(Sums& sums, const FactorCopy& x_copy,
                                             const FactorCopy& y_copy, uint32_t ring, int rows,
                                             int warp_m, int warp_n) {
  const int stages = (rows + kStageRows - 1) / kStageRows;
  const auto start = [&](int i) {
    if (i < stages) {
      const uint32_t stage = ring + i % kStages * kStageBytes;
      x_copy.Start(i * kStageRows, stage);
      y_copy.Start(i * kStageRows, stage + kFactorBytes);
    }
    CommitCopies();  // Empty groups keep the count.
  };
  for (int i = 0; i < kStages - 1; ++i) start(i);
  for (int i = 0; i < stages; ++i) {
    WaitForCopies<kStages - 2>();
    // Stage i is there for all, and all have read the stage that the next copies overwrite.
    __syncthreads();
    start(i + kStages - 1);
    MultiplyStage(sums, ring + i % kStages * kStageBytes, warp_m, warp_n);
  }
  WaitForCopies<0>();
  __syncthreads();  // The ring is free for the next tile.
}

// Where a warp's fragment goes: element (0, 0) of it in d, and what of d lies from there on.
struct FragmentTarget {
  float* first;
  int64_t row_stride;
  int rows_left;
  int columns_left;
};

// Stores or adds 16 rows of a warp's sums, laid out as mma.sync leaves them: lane l holds, of each
// 8-column chunk, columns 2 * (l % 4) and the next of row l / 4 (elements 0, 1) and of row l / 4 +
// 8 (elements 2, 3). Neighbouring lanes swap halves of two chunks, so that each owns four adjacent
// columns: 16-byte accesses, 64 contiguous bytes a quad.
template <bool kAccumulate>
__device__ __forceinline__ void StoreFragment(const float* fragment, const FragmentTarget& target) {
  static_assert(kBlocksN % 8 == 0);
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2 != 0;
  const int row = lane / 4;
  const int column = 8 * (lane % 2) + 4 * (lane % 4 / 2);
  float* const d = target.first + row * target.row_stride + column;
  const bool row_fits[2] = {row < target.rows_left, row + 8 < target.rows_left};
  // Eight vectors at a time: enough loads in flight without more registers than there are.
#pragma unroll
  for (int batch = 0; batch < kBlocksN; batch += 8) {
    float4 old[4][2];
    if constexpr (kAccumulate) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int offset = 8 * (batch + 2 * pair);
          if (row_fits[half] && column + offset < target.columns_left) {
            old[pair][half] =
                __ldcs(reinterpret_cast<const float4*>(d + half * 8 * target.row_stride + offset));
          }
        }
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int offset = 8 * (batch + 2 * pair);
        const float* even_chunk = fragment + 4 * (batch + 2 * pair) + 2 * half;
        const float* odd_chunk = even_chunk + 4;
        const float x = __shfl_xor_sync(~0u, odd ? even_chunk[0] : odd_chunk[0], 1);
        const float y = __shfl_xor_sync(~0u, odd ? even_chunk[1] : odd_chunk[1], 1);
        float4 sum = odd ? make_float4(x, y, odd_chunk[0], odd_chunk[1])
                         : make_float4(even_chunk[0], even_chunk[1], x, y);
        if (row_fits[half] && column + offset < target.columns_left) {
          if constexpr (kAccumulate) {
            sum.x += old[pair][half].x;
            sum.y += old[pair][half].y;
            sum.z += old[pair][half].z;
            sum.w += old[pair][half].w;
          }
          __stcs(reinterpret_cast<float4*>(d + half * 8 * target.row_stride + offset), sum);
        }
      }
    }
  }
}

template <bool kAccumulate>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    GroupedKernel(const __nv_bfloat16* x_RM, const __nv_bfloat16* y_RN, const Problem problem) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  uint16_t* const expert_at = reinterpret_cast<uint16_t*>(dynamic + kRingBytes);
  grouped::SortExperts(problem, reinterpret_cast<uint64_t*>(dynamic), expert_at);
  const uint32_t ring = internal::SharedAddressOf(dynamic);
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / 2 * kWarpWidth;
  const int warp_n = warp % 2 * kWarpWidth;

  const TileOrder order(problem, kTileWidth, kTileWidth);
  for (int index = blockIdx.x; index < order.count(); index += gridDim.x) {
    const Tile tile = order.At(index, expert_at, problem.row_end_E);
    if (kAccumulate && tile.rows == 0) continue;
    const int m = tile.m * kTileWidth;
    const int n = tile.n * kTileWidth;
    Sums sums = {};
    if (tile.rows > 0) {
      MultiplyTile(sums, FactorCopy(x_RM, problem.x_width, tile, m),
                   FactorCopy(y_RN, problem.y_width, tile, n), ring, tile.rows, warp_m, warp_n);
    }
    float* const d = problem.d_EMN + tile.expert * problem.d_expert_stride;
#pragma unroll
    for (int block = 0; block < kBlocksM; ++block) {
      const int row = m + warp_m + block * 16;
      StoreFragment<kAccumulate>(sums[block], {.first = d + row * problem.d_row_stride + n + warp_n,
                                               .row_stride = problem.d_row_stride,
                                               .rows_left = problem.x_width - row,
                                               .columns_left = problem.y_width - n - warp_n});
    }
  }
}

template <bool kAccumulate>
void Launch(const Problem& problem, const __nv_bfloat16* x_RM, const __nv_bfloat16* y_RN,
            cudaStream_t stream) {
  const int shared_bytes = kRingBytes + static_cast<int>(problem.expert_count * sizeof(uint16_t));
  // CheckLaunch sees its result too.
  static_cast<void>(cudaFuncSetAttribute(
      GroupedKernel<kAccumulate>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  const int tiles = TileOrder(problem, kTileWidth, kTileWidth).count();
  const int blocks = std::min(tiles, kBlocksPerMultiprocessor * grouped::MultiprocessorCount());
  GroupedKernel<kAccumulate><<<blocks, kThreads, shared_bytes, stream>>>(x_RM, y_RN, problem);
  CheckLaunch("GroupedWeightGradient");
}

bool Aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void CheckArguments(const GroupedWeightGradientShape& shape, const __nv_bfloat16* x_RM,
                    const __nv_bfloat16* y_RN, const float* d_EMN) {
  OOM_CHECK(shape.rows >= 0 && shape.rows <= INT32_MAX);
  OOM_CHECK(shape.expert_count <= kGroupedExpertsMax);
  OOM_CHECK(shape.x_width % 8 == 0 && shape.y_width % 8 == 0);
  OOM_CHECK(shape.d_row_stride % 4 == 0 && shape.d_row_stride >= shape.y_width);
  OOM_CHECK(shape.d_expert_stride > 0 && shape.d_expert_stride % shape.d_row_stride == 0);
  OOM_CHECK(Aligned16(x_RM) && Aligned16(y_RN) && Aligned16(d_EMN));
  // Tiles are counted in int32; the smallest one has 128 x 128 elements.
  const int64_t tiles_m = (shape.x_width + kTileWidth - 1) / kTileWidth;
  const int64_t tiles_n = (shape.y_width + kTileWidth - 1) / kTileWidth;
  OOM_CHECK(shape.x_width <= INT32_MAX / 2 && shape.y_width <= INT32_MAX / 2);
  OOM_CHECK(shape.expert_count * tiles_m * tiles_n <= INT32_MAX / 2);
}

}  // namespace

bool HasHopperTensorCores() {
  int device = 0;
  int major = 0;
  int minor = 0;
  OOM_CHECK(cudaGetDevice(&device) == cudaSuccess);
  OOM_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
            cudaSuccess);
  OOM_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) ==
            cudaSuccess);
  return major == 9 && minor == 0;
}

void GroupedWeightGradient(const GroupedWeightGradientShape& shape,
                           const GroupedWeightGradientOptions& options, const __nv_bfloat16* x_RM,
                           const __nv_bfloat16* y_RN, const int32_t* row_end_E, float* d_EMN,
                           cudaStream_t stream) {
  if (shape.expert_count == 0 || shape.x_width == 0 || shape.y_width == 0) return;
  CheckArguments(shape, x_RM, y_RN, d_EMN);
  const Problem problem = {.row_end_E = row_end_E,
                           .d_EMN = d_EMN,
                           .d_row_stride = shape.d_row_stride,
                           .d_expert_stride = shape.d_expert_stride,
                           .rows = static_cast<int>(shape.rows),
                           .expert_count = static_cast<int>(shape.expert_count),
                           .x_width = static_cast<int>(shape.x_width),
                           .y_width = static_cast<int>(shape.y_width)};
  if (options.hopper) {
    grouped::LaunchHopper(problem, options.accumulate, x_RM, y_RN, stream);
  } else if (options.accumulate) {
    Launch<true>(problem, x_RM, y_RN, stream);
  } else {
    Launch<false>(problem, x_RM, y_RN, stream);
  }
}

}  // namespace oom
