// What a chunk is before it meets a state. A block of four warps takes a chunk and a key head: the
// products of keys and of queries are those of all its value heads. A warp has 16 rows of them.
//
// The inverse of a lower triangle 1 + L in blocks of 16: those on the diagonal by forward
// substitution, a lane a column; below, A_ij = -A_ii sum over j <= m < i of L_im A_mj. A warp takes
// a column j of blocks and makes the transposes A_ij.T = -(sum of A_mj.T L_im.T) A_ii.T, each the
// next one's factor in registers. Factors are sums of two FP16 numbers, which is FP32 but for the
// last two bits.

#include "runtime/kernels/gated_delta_rule_stages.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/tensor_fragments.cuh"

namespace oom::internal {
namespace {

constexpr int kThreads = 128;
constexpr int kBlock = 16;
// Of FP32 squares in shared memory: pairs from eight rows lie in different banks.
constexpr int kStride = 72;
constexpr int kTileBytes = kTokenElements * 2;
constexpr int kFixedBytes = 2 * kTileBytes + 2 * kDeltaChunk * kStride * 4;

// The sums of g over a chunk and what follows from them, by one warp.
__device__ void MakeGates(const DeltaStage& stage, const DeltaChunk& chunk, int head,
                          float* shared_gates, float* gates) {
  const int lane = threadIdx.x % 32;
  const int heads = stage.shape.value_heads;
  double g[2];
  float beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    const int64_t place = (chunk.first + token) * heads + head;
    g[i] = token < chunk.count ? static_cast<double>(stage.input.log_decay_TN[place]) : 0.0;
    beta[i] = token < chunk.count ? stage.input.beta_TN[place] : 0.0f;
  }
  double sum = g[0] + g[1];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double before = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
    if (lane >= offset) sum += before;
  }
  const double last = __shfl_sync(0xFFFFFFFFu, sum, 31);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const double here = i == 0 ? sum - g[1] : sum;
    const float high = static_cast<float>(here);
    const float values[kGateRows] = {expf(high), expf(static_cast<float>(last - here)), high,
                                     static_cast<float>(here - high), beta[i]};
#pragma unroll
    for (int row = 0; row < kGateRows; ++row) {
      shared_gates[row * kDeltaChunk + 2 * lane + i] = values[row];
      gates[row * kDeltaChunk + 2 * lane + i] = values[row];
    }
  }
}

// D_ij of i >= j.
__device__ __forceinline__ float Between(const float* gates, int i, int j) {
  const float* high = gates + kSumHigh * kDeltaChunk;
  const float* low = gates + kSumLow * kDeltaChunk;
  return __expf((high[i] - high[j]) + (low[i] - low[j]));
}

// A block's column of the inverse where it meets the diagonal: lane c makes column c.
__device__ void InvertDiagonalBlock(const float* lower, float* inverse, int block) {
  const int column = threadIdx.x % kBlock;
  const int place = block * kBlock * (kStride + 1);
  float x[kBlock];
#pragma unroll
  for (int row = 0; row < kBlock; ++row) {
    float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < row; ++m) sum -= lower[place + row * kStride + m] * x[m];
    x[row] = sum;
  }
  if (threadIdx.x % 32 >= kBlock) return;
#pragma unroll
  for (int row = 0; row < kBlock; ++row) inverse[place + row * kStride + column] = x[row];
}

// A pair of FP32 numbers as the sum of two pairs of FP16 ones.
struct Split {
  __device__ __forceinline__ Split(float x, float y) : high(PackHalves(x, y)) {
    const float2 rounded = UnpackHalves(high);
    low = PackHalves(x - rounded.x, y - rounded.y);
  }
  uint32_t high;
  uint32_t low;
};

struct SplitFactor {
  uint32_t high[4];
  uint32_t low[4];

  __device__ __forceinline__ void Set(int i, float x, float y) {
    const Split split(x, y);
    high[i] = split.high;
    low[i] = split.low;
  }
  __device__ __forceinline__ void SetSums(const float (&left)[4], const float (&right)[4]) {
    Set(0, left[0], left[1]);
    Set(1, left[2], left[3]);
    Set(2, right[0], right[1]);
    Set(3, right[2], right[3]);
  }
};

// sums += a times the transpose of the 16 x 16 block at `block`.
__device__ __forceinline__ void AddProductWithTransposed(float (&sums)[2][4], const SplitFactor& a,
                                                         const float* block) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float* row = block + (8 * n + lane / 4) * kStride + 2 * (lane % 4);
    const float2 near = *reinterpret_cast<const float2*>(row);
    const float2 far = *reinterpret_cast<const float2*>(row + 8);
    const Split b0(near.x, near.y), b1(far.x, far.y);
    MultiplyAdd(sums[n], a.high, b0.high, b1.high);
    MultiplyAdd(sums[n], a.high, b0.low, b1.low);
    MultiplyAdd(sums[n], a.low, b0.high, b1.high);
  }
}

// The blocks of column `column` below the diagonal.
__device__ void InvertBelow(const float* lower, float* inverse, int column) {
  const int lane = threadIdx.x % 32;
  SplitFactor transposed[3];  // A_mj.T of rows m of blocks so far.
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    if (i <= column) continue;
    float sums[2][4] = {};
#pragma unroll
    for (int m = 0; m < i; ++m) {
      if (m < column) continue;
      if (m == column && i == column + 1) {
        const float* diagonal = inverse + m * kBlock * (kStride + 1);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int row = 2 * (lane % 4) + part / 2 * 8, element = lane / 4 + part % 2 * 8;
          transposed[m].Set(part, diagonal[row * kStride + element],
                            diagonal[(row + 1) * kStride + element]);
        }
      }
      AddProductWithTransposed(sums, transposed[m], lower + (i * kStride + m) * kBlock);
    }
    SplitFactor factor;
    factor.SetSums(sums[0], sums[1]);
    float block[2][4] = {};
    AddProductWithTransposed(block, factor, inverse + i * kBlock * (kStride + 1));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        block[n][e] = -block[n][e];
        const int row = i * kBlock + 8 * n + 2 * (lane % 4) + e % 2;
        inverse[row * kStride + column * kBlock + lane / 4 + e / 2 * 8] = block[n][e];
      }
    }
    if (i < 3) transposed[i < 3 ? i : 0].SetSums(block[0], block[1]);
  }
}

// B and, if wanted, A, eight columns a thread at a time.
__device__ void StoreInverse(const float* inverse, const float* gates, __half* write,
                             __half* kept) {
#pragma unroll
  for (int step = 0; step < kSquareElements / 8 / kThreads; ++step) {
    const int index = step * kThreads + threadIdx.x;
    const int row = index / 8, column = index % 8 * 8;
    float a[8] = {}, b[8] = {};
    if (column / kBlock <= row / kBlock) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (column + e > row) continue;
        a[e] = inverse[row * kStride + column + e];
        b[e] = a[e] * Between(gates, row, column + e) * gates[kBeta * kDeltaChunk + column + e];
      }
    }
    const auto store = [&](__half* square, const float(&x)[8]) {
      reinterpret_cast<uint4*>(square)[index] =
          make_uint4(PackHalves(x[0], x[1]), PackHalves(x[2], x[3]), PackHalves(x[4], x[5]),
                     PackHalves(x[6], x[7]));
    };
    store(write, b);
    if (kept != nullptr) store(kept, a);
  }
}

__global__ void __launch_bounds__(kThreads, 2) PrepareKernel(DeltaStage stage, float scale) {
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const keys = shared;
  unsigned char* const queries = shared + kTileBytes;
  float* const lower = reinterpret_cast<float*>(shared + 2 * kTileBytes);
  float* const inverse = lower + kDeltaChunk * kStride;
  float* const all_gates = inverse + kDeltaChunk * kStride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_head = blockIdx.x % stage.shape.key_heads;
  const int64_t chunk_index = blockIdx.x / stage.shape.key_heads;
  const DeltaChunk chunk = stage.input.chunks[chunk_index];
  const int group = stage.shape.value_heads / stage.shape.key_heads;

  const int64_t key_stride = int64_t{stage.shape.key_heads} * kDeltaHeadSize;
  const int64_t key_place = chunk.first * key_stride + key_head * kDeltaHeadSize;
  LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(keys, stage.input.key_TGK + key_place,
                                                       key_stride, chunk.count);
  LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(queries, stage.input.query_TGK + key_place,
                                                       key_stride, chunk.count);
  CommitCopies();
  const int64_t first_tile = chunk_index * stage.shape.value_heads + key_head * group;
  for (int member = warp; member < group; member += kThreads / 32) {
    MakeGates(stage, chunk, key_head * group + member, all_gates + member * kGateRows * kDeltaChunk,
              stage.scratch.gates + (first_tile + member) * kGateRows * kDeltaChunk);
  }
  WaitForCopies<0>();
  __syncthreads();

  float key_products[8][4] = {}, query_products[8][4] = {};
#pragma unroll
  for (int k = 0; k < kDeltaHeadSize; k += 16) {
    uint32_t key[4], query[4];
    LoadFactorA<kDeltaHeadSize>(key, keys, warp * 16, k);
    LoadFactorA<kDeltaHeadSize>(query, queries, warp * 16, k);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t b[4];
      LoadFactorB<kDeltaHeadSize>(b, keys, n * 16, k);
      MultiplyAdd(key_products[2 * n], key, b[0], b[1]);
      MultiplyAdd(key_products[2 * n + 1], key, b[2], b[3]);
      MultiplyAdd(query_products[2 * n], query, b[0], b[1]);
      MultiplyAdd(query_products[2 * n + 1], query, b[2], b[3]);
    }
  }

  for (int member = 0; member < group; ++member) {
    const float* const gates = all_gates + member * kGateRows * kDeltaChunk;
    __half* const scores = stage.scratch.scores + (first_tile + member) * kSquareElements;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + lane / 4 + half * 8;
      const float beta = gates[kBeta * kDeltaChunk + row];
      uint32_t words[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float score[2];
        float2 below;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + 2 * (lane % 4) + e;
          score[e] = column <= row
                         ? scale * Between(gates, row, column) * query_products[n][2 * half + e]
                         : 0.0f;
          (e == 0 ? below.x : below.y) = column < row ? beta * key_products[n][2 * half + e] : 0.0f;
        }
        words[n] = PackHalves(score[0], score[1]);
        *reinterpret_cast<float2*>(lower + row * kStride + 8 * n + 2 * (lane % 4)) = below;
      }
      StoreRowOfSums(scores + row * kDeltaChunk, words[0], words[1], words[2], words[3]);
      StoreRowOfSums(scores + row * kDeltaChunk + 32, words[4], words[5], words[6], words[7]);
    }
    __syncthreads();
    InvertDiagonalBlock(lower, inverse, warp);
    __syncthreads();
    InvertBelow(lower, inverse, warp);
    __syncthreads();
    const int64_t tile = (first_tile + member) * kSquareElements;
    StoreInverse(inverse, gates, stage.scratch.write + tile,
                 stage.scratch.inverse == nullptr ? nullptr : stage.scratch.inverse + tile);
  }
}

}  // namespace

void PrepareDeltaChunks(const DeltaStage& stage, cudaStream_t stream) {
  const int group = stage.shape.value_heads / stage.shape.key_heads;
  const int shared_bytes =
      kFixedBytes + group * kGateRows * kDeltaChunk * static_cast<int>(sizeof(float));
  static_cast<void>(cudaFuncSetAttribute(PrepareKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         shared_bytes));
  const auto blocks = static_cast<unsigned>(stage.shape.chunks * stage.shape.key_heads);
  PrepareKernel<<<blocks, kThreads, shared_bytes, stream>>>(
      stage, 1.0f / sqrtf(static_cast<float>(kDeltaHeadSize)));
  CheckLaunch("PrepareDeltaChunks");
}

}  // namespace oom::internal
