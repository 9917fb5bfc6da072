// dq, dk and dg, by chunk and key head. Over the key head's value heads, in order, add up
//   dq: s e^G do S.T + (s D * dP) k;
//   dk: -e^G dW S.T + e^(G_last - G) R E.T + (s D * dP).T q + (Z + Z.T) k.
// dG is row sums of q and k with the first three of these, the second with dk's as it grows:
//   dg_t = sum_{i >= t} (dG from D + q * dq's + k * -e^G dW S.T)_i + sum_{i < t} (k * e^(..) R
//   E.T)_i
//          + e^G_last <E, S>.
// Eight warps: four times 16 rows, twice 64 columns. k and q stay; two places of 32 KiB take first
// S with do and e^G dW, then E beside S, then R and the squares beside E: 99 KiB are all that a
// block has on architecture 89, and let two blocks share a multiprocessor elsewhere.

#include "runtime/kernels/gated_delta_rule_scale.cuh"
#include "runtime/kernels/gated_delta_rule_stages.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/tensor_fragments.cuh"

namespace oom::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kTileBytes = kTokenElements * 2;
constexpr int kSquareBytes = kSquareElements * 2;
constexpr int kStateBytes = kStateElements * 2;

constexpr int kKey = 0;
constexpr int kQuery = kKey + kTileBytes;
constexpr int kState = kQuery + kTileBytes;
constexpr int kOutputGradient = kState + kStateBytes;
constexpr int kReadGradient = kOutputGradient + kTileBytes;
constexpr int kStateGradient = kOutputGradient;
constexpr int kWritten = kState;
constexpr int kScores = kWritten + kTileBytes;
constexpr int kLower = kScores + kSquareBytes;
constexpr int kGates = kState + 2 * kStateBytes;
constexpr int kRows = kGates + kGateRows * kDeltaChunk * 4;  // [kinds][2][64]
constexpr int kDots = kRows + 2 * 2 * kDeltaChunk * 4;       // [8]
constexpr int kSharedBytes = kDots + 8 * 4;
static_assert(kSharedBytes <= 99 * 1024);

enum Kind { kFromHere = 0, kUntilHere = 1 };

// A warp's part of dq or dk: 16 rows, 64 columns.
struct Part {
  __device__ __forceinline__ Part()
      : row(static_cast<int>(threadIdx.x / 32 % 4) * 16),
        column(static_cast<int>(threadIdx.x / 128) * 64) {}
  int row;
  int column;
};

// The lane's two rows of `tile` * `sums`, added up over the warp's columns.
__device__ __forceinline__ float2 RowSums(const unsigned char* tile, const Part& part,
                                          const float (&sums)[8][4]) {
  const int lane = threadIdx.x % 32;
  float of_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 x = UnpackHalves(*reinterpret_cast<const uint32_t*>(
          tile + PairOffset<kDeltaHeadSize>(part.row + lane / 4 + half * 8,
                                            part.column + 8 * n + 2 * (lane % 4))));
      sum += x.x * sums[n][2 * half] + x.y * sums[n][2 * half + 1];
    }
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    of_row[half] = sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  }
  return {of_row[0], of_row[1]};
}

// The rows of a factor times `low` (the lane's first) and `high` (its second).
__device__ __forceinline__ void ScaleRows(uint32_t (&a)[4], float low, float high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float factor = i % 2 == 0 ? low : high;
    const float2 x = UnpackHalves(a[i]);
    a[i] = PackHalves(factor * x.x, factor * x.y);
  }
}

__device__ __forceinline__ void AddPair(float (&sums)[8][4], int n, const uint32_t (&a)[4],
                                        const uint32_t (&b)[4]) {
  MultiplyAdd(sums[2 * n], a, b[0], b[1]);
  MultiplyAdd(sums[2 * n + 1], a, b[2], b[3]);
}

// dq += (s e^G do) S.T and dk += (-e^G dW) S.T.
__device__ __forceinline__ void AddFromState(float (&dquery)[8][4], float (&dkey)[8][4],
                                             const unsigned char* shared, const Part& part,
                                             float low, float high) {
#pragma unroll 2
  for (int k = 0; k < 8; ++k) {
    uint32_t doutput[4], dread[4];
    LoadFactorA<kDeltaHeadSize>(doutput, shared + kOutputGradient, part.row, k * 16);
    ScaleRows(doutput, low, high);
    LoadFactorATransposed<kDeltaChunk>(dread, shared + kReadGradient, part.row, k * 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      LoadFactorBTransposed<kDeltaHeadSize>(b, shared + kState, part.column + n * 16, k * 16);
      AddPair(dquery, n, doutput, b);
      AddPair(dkey, n, dread, b);
    }
  }
}

// dk += (e^(G_last - G) R) E.T.
__device__ __forceinline__ void AddFromStateGradient(float (&dkey)[8][4],
                                                     const unsigned char* shared, const Part& part,
                                                     float low, float high) {
#pragma unroll 2
  for (int k = 0; k < 8; ++k) {
    uint32_t written[4];
    LoadFactorATransposed<kDeltaChunk>(written, shared + kWritten, part.row, k * 16);
    ScaleRows(written, low, high);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      LoadFactorBTransposed<kDeltaHeadSize>(b, shared + kStateGradient, part.column + n * 16,
                                            k * 16);
      AddPair(dkey, n, written, b);
    }
  }
}

// What the squares, lower triangles, contribute.
__device__ __forceinline__ void AddWithinChunk(float (&dquery)[8][4], float (&dkey)[8][4],
                                               const unsigned char* shared, const Part& part) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const bool below = k * 16 <= part.row, above = k * 16 >= part.row;
    uint32_t scores[4], lower[4], scores_transposed[4], lower_transposed[4];
    if (below) {
      LoadFactorA<kDeltaChunk>(scores, shared + kScores, part.row, k * 16);
      LoadFactorA<kDeltaChunk>(lower, shared + kLower, part.row, k * 16);
    }
    if (above) {
      LoadFactorATransposed<kDeltaChunk>(scores_transposed, shared + kScores, part.row, k * 16);
      LoadFactorATransposed<kDeltaChunk>(lower_transposed, shared + kLower, part.row, k * 16);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t key[4];
      LoadFactorBTransposed<kDeltaHeadSize>(key, shared + kKey, part.column + n * 16, k * 16);
      if (below) {
        AddPair(dquery, n, scores, key);
        AddPair(dkey, n, lower, key);
      }
      if (above) {
        uint32_t query[4];
        LoadFactorBTransposed<kDeltaHeadSize>(query, shared + kQuery, part.column + n * 16, k * 16);
        AddPair(dkey, n, scores_transposed, query);
        AddPair(dkey, n, lower_transposed, key);
      }
    }
  }
}

// <E, S> of the thread's pieces: they lie alike in both tiles.
__device__ __forceinline__ float StateProduct(const unsigned char* shared) {
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < kStateBytes / 16 / kThreads; ++step) {
    const int piece = step * kThreads + threadIdx.x;
    const uint4 a = reinterpret_cast<const uint4*>(shared + kState)[piece];
    const uint4 b = reinterpret_cast<const uint4*>(shared + kStateGradient)[piece];
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 p = UnpackHalves(x[i]), q = UnpackHalves(y[i]);
      sum += p.x * q.x + p.y * q.y;
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
  }
  return sum;
}

// dg of a chunk by one warp. In FP64: what a position adds, an earlier one takes away.
__device__ __forceinline__ void StoreDecayGradient(const unsigned char* shared, const float* dsum,
                                                   const DeltaChunk& chunk, int64_t heads, int head,
                                                   double unit, float* dlog_decay_TN) {
  const int lane = threadIdx.x % 32;
  const float* rows = reinterpret_cast<const float*>(shared + kRows);
  const auto at = [&](Kind kind, int token) {
    return static_cast<double>(rows[kind * 2 * kDeltaChunk + token]) +
           static_cast<double>(rows[(kind * 2 + 1) * kDeltaChunk + token]);
  };
  double dot = 0.0;
  for (int i = 0; i < kThreads / 32; ++i) dot += reinterpret_cast<const float*>(shared + kDots)[i];
  const double whole =
      reinterpret_cast<const float*>(shared + kGates)[kSinceStart * kDeltaChunk + kDeltaChunk - 1];
  double here[2], until[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    here[i] = at(kFromHere, token) + static_cast<double>(dsum[token]);
    until[i] = at(kUntilHere, token);
  }
  double from_here = here[0] + here[1], until_here = until[0] + until[1];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double later = __shfl_down_sync(0xFFFFFFFFu, from_here, offset);
    const double earlier = __shfl_up_sync(0xFFFFFFFFu, until_here, offset);
    if (lane + offset < 32) from_here += later;
    if (lane >= offset) until_here += earlier;
  }
  const double before = until_here - until[0] - until[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    if (token >= chunk.count) continue;
    const double sum =
        (i == 0 ? from_here + before : from_here - here[0] + before + until[0]) + whole * dot;
    dlog_decay_TN[(chunk.first + token) * heads + head] = static_cast<float>(unit * sum);
  }
}

__device__ __forceinline__ void StorePart(float* gradient, int64_t stride, const Part& part,
                                          int tokens, float unit, const float (&sums)[8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = part.row + lane / 4 + half * 8;
    if (token >= tokens) continue;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      *reinterpret_cast<float2*>(gradient + token * stride + part.column + 8 * n +
                                 2 * (lane % 4)) = {unit * sums[n][2 * half],
                                                    unit * sums[n][2 * half + 1]};
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    KeyGradientKernel(DeltaStage stage, GatedDeltaRuleKernelGradients gradients, float scale) {
  extern __shared__ __align__(128) unsigned char shared[];
  const float* const gates = reinterpret_cast<const float*>(shared + kGates);
  float* const rows = reinterpret_cast<float*>(shared + kRows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Part part;
  const GatedDeltaRuleShape& shape = stage.shape;
  const DeltaScratch& scratch = stage.scratch;
  const int key_head = static_cast<int>(blockIdx.x % shape.key_heads);
  const int64_t chunk_index = blockIdx.x / shape.key_heads;
  const DeltaChunk chunk = stage.input.chunks[chunk_index];
  const int group = shape.value_heads / shape.key_heads;
  const int64_t key_stride = int64_t{shape.key_heads} * kDeltaHeadSize;
  const int64_t value_stride = int64_t{shape.value_heads} * kDeltaHeadSize;
  const int64_t key_place = chunk.first * key_stride + key_head * kDeltaHeadSize;
  const float unit = 1.0f / GradientScale(scratch.magnitude[key_head]);
  const int row = part.row + lane / 4;

  LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(
      shared + kKey, stage.input.key_TGK + key_place, key_stride, chunk.count);
  LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(
      shared + kQuery, stage.input.query_TGK + key_place, key_stride, chunk.count);
  float dquery[8][4] = {}, dkey[8][4] = {};
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    const int64_t tile = chunk_index * shape.value_heads + head;
    LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaHeadSize>(
        shared + kState, scratch.states + tile * kStateElements, kDeltaHeadSize, kDeltaHeadSize);
    LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(
        shared + kOutputGradient,
        scratch.doutput + chunk.first * value_stride + head * kDeltaHeadSize, value_stride,
        chunk.count);
    LoadTileAsync<kDeltaChunk, kThreads, kDeltaHeadSize>(
        shared + kReadGradient, scratch.dread + tile * kTokenElements, kDeltaChunk, kDeltaHeadSize);
    if (threadIdx.x < kGateRows * kDeltaChunk / 4) {
      CopyPieceAsync(SharedAddressOf(shared + kGates + threadIdx.x * 16),
                     scratch.gates + tile * kGateRows * kDeltaChunk + threadIdx.x * 4, true);
    }
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
    const unsigned char* tiles = shared + UnknownZero();
    const float2 queries_before = RowSums(tiles + kQuery, part, dquery);
    const float2 keys_before = RowSums(tiles + kKey, part, dkey);
    AddFromState(dquery, dkey, tiles, part, scale * gates[kSinceStart * kDeltaChunk + row],
                 scale * gates[kSinceStart * kDeltaChunk + row + 8]);
    tiles = shared + UnknownZero();
    const float2 queries_after = RowSums(tiles + kQuery, part, dquery);
    const float2 keys_after = RowSums(tiles + kKey, part, dkey);
    __syncthreads();

    LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaHeadSize>(shared + kStateGradient,
                                                            scratch.dstates + tile * kStateElements,
                                                            kDeltaHeadSize, kDeltaHeadSize);
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
    const float dot = StateProduct(shared);
    __syncthreads();

    LoadTileAsync<kDeltaChunk, kThreads, kDeltaHeadSize>(
        shared + kWritten, scratch.written + tile * kTokenElements, kDeltaChunk, kDeltaHeadSize);
    LoadTileAsync<kDeltaChunk, kThreads, kDeltaChunk>(
        shared + kScores, scratch.scores + tile * kSquareElements, kDeltaChunk, kDeltaChunk);
    LoadTileAsync<kDeltaChunk, kThreads, kDeltaChunk>(
        shared + kLower, scratch.write + tile * kSquareElements, kDeltaChunk, kDeltaChunk);
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
    tiles = shared + UnknownZero();
    AddFromStateGradient(dkey, tiles, part, gates[kUntilEnd * kDeltaChunk + row],
                         gates[kUntilEnd * kDeltaChunk + row + 8]);
    const float2 keys_last = RowSums(tiles + kKey, part, dkey);
    AddWithinChunk(dquery, dkey, shared + UnknownZero(), part);
    if (lane % 4 == 0) {
      float* const from_here = rows + (kFromHere * 2 + part.column / 64) * kDeltaChunk + row;
      float* const until_here = rows + (kUntilHere * 2 + part.column / 64) * kDeltaChunk + row;
      from_here[0] = (queries_after.x - queries_before.x) + (keys_after.x - keys_before.x);
      from_here[8] = (queries_after.y - queries_before.y) + (keys_after.y - keys_before.y);
      until_here[0] = keys_last.x - keys_after.x;
      until_here[8] = keys_last.y - keys_after.y;
    }
    if (lane == 0) reinterpret_cast<float*>(shared + kDots)[warp] = dot;
    __syncthreads();
    if (warp == 0) {
      StoreDecayGradient(shared, scratch.dsum + tile * kDeltaChunk, chunk, shape.value_heads, head,
                         unit, gradients.log_decay_TN);
    }
    __syncthreads();
  }
  StorePart(gradients.query_TGK + key_place, key_stride, part, chunk.count, unit, dquery);
  StorePart(gradients.key_TGK + key_place, key_stride, part, chunk.count, unit, dkey);
}

}  // namespace

void DeltaKeyGradients(const DeltaStage& stage, const GatedDeltaRuleKernelGradients& gradients,
                       cudaStream_t stream) {
  static_cast<void>(cudaFuncSetAttribute(
      KeyGradientKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const auto blocks = static_cast<unsigned>(stage.shape.chunks * stage.shape.key_heads);
  KeyGradientKernel<<<blocks, kThreads, kSharedBytes, stream>>>(
      stage, gradients, 1.0f / sqrtf(static_cast<float>(kDeltaHeadSize)));
  CheckLaunch("DeltaKeyGradients");
}

}  // namespace oom::internal
