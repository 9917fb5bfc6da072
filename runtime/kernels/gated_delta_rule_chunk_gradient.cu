// What a chunk's inverse and scores contribute, by chunk and value head:
//   dB = dR W.T;  dP = do R.T;  dA = D * dB diag(beta);
//   dL = strict lower triangle of -A.T dA A.T;  Z = diag(beta) dL;  s D * dP;
//   dbeta_j = sum_i (D * dB * A)_ij + sum_i (dL * k k.T)_ji;
//   dG from D: row sums less column sums of D * dB * A diag(beta) + dP * P, below the diagonal: on
//   it both are the same.
// A warp has 16 rows of every square, and of those the columns up to its last row's. Only dA is
// another warp's factor.

#include "runtime/kernels/gated_delta_rule_scale.cuh"
#include "runtime/kernels/gated_delta_rule_stages.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/tensor_fragments.cuh"

namespace oom::internal {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTileBytes = kTokenElements * 2;
constexpr int kSquareBytes = kSquareElements * 2;

// In shared memory. The first two make room for k and dA when they have been read.
constexpr int kWrittenGradient = 0;
constexpr int kKey = kWrittenGradient;
constexpr int kMissing = kWrittenGradient + kTileBytes;
constexpr int kInverseGradient = kMissing;
constexpr int kOutputGradient = kMissing + kTileBytes;
constexpr int kWritten = kOutputGradient + kTileBytes;
constexpr int kInverse = kWritten + kTileBytes;
constexpr int kScores = kInverse + kSquareBytes;
constexpr int kGates = kScores + kSquareBytes;
constexpr int kRows = kGates + kGateRows * kDeltaChunk * 4;  // [2][64]
constexpr int kColumns = kRows + 2 * kDeltaChunk * 4;        // [kWarps][2][64]
constexpr int kSharedBytes = kColumns + kWarps * 2 * kDeltaChunk * 4;

enum Kind { kOfSum = 0, kOfBeta = 1 };

__device__ __forceinline__ float SumOverQuad(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// A square's columns, added up over the warp's rows, for the lanes 0 to 3.
__device__ __forceinline__ float SumOverRows(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 4);
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 8);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 16);
}

// Where a lane's elements of a square lie.
struct Element {
  __device__ __forceinline__ Element(int n, int e)
      : row(static_cast<int>(threadIdx.x / 32) * 16 + static_cast<int>(threadIdx.x % 32) / 4 +
            e / 2 * 8),
        column(8 * n + 2 * static_cast<int>(threadIdx.x % 4) + e % 2) {}
  int row;
  int column;
};

__device__ __forceinline__ float Between(const float* gates, const Element& at) {
  const float* high = gates + kSumHigh * kDeltaChunk;
  const float* low = gates + kSumLow * kDeltaChunk;
  return __expf((high[at.row] - high[at.column]) + (low[at.row] - low[at.column]));
}

__device__ __forceinline__ float2 SquarePair(const unsigned char* square, const Element& at) {
  return UnpackHalves(
      *reinterpret_cast<const uint32_t*>(square + PairOffset<kDeltaChunk>(at.row, at.column)));
}

// Rows of `sums` as FP16, those behind the warp's last column as zeros.
__device__ __forceinline__ void StoreSquare(__half* square, const float (&sums)[8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t word[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      word[n] = n / 2 <= warp ? PackHalves(sums[n][2 * half], sums[n][2 * half + 1]) : 0u;
    }
    __half* const row = square + (warp * 16 + lane / 4 + half * 8) * kDeltaChunk;
    StoreRowOfSums(row, word[0], word[1], word[2], word[3]);
    StoreRowOfSums(row + 32, word[4], word[5], word[6], word[7]);
  }
}

__device__ __forceinline__ void AddPair(float (&sums)[8][4], int n, const uint32_t (&a)[4],
                                        const uint32_t (&b)[4]) {
  MultiplyAdd(sums[2 * n], a, b[0], b[1]);
  MultiplyAdd(sums[2 * n + 1], a, b[2], b[3]);
}

// -A.T dA A.T, below the diagonal.
__device__ __forceinline__ void LowerGradient(float (&result)[8][4], const unsigned char* inverse,
                                              const unsigned char* dinverse) {
  const int warp = threadIdx.x / 32;
  float half_way[8][4] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k < warp) continue;
    uint32_t a[4];
    LoadFactorATransposed<kDeltaChunk>(a, inverse, warp * 16, k * 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t b[4];
      LoadFactorBTransposed<kDeltaChunk>(b, dinverse, n * 16, k * 16);
      AddPair(half_way, n, a, b);
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k > warp) continue;
    uint32_t a[4];
    FactorOfSums(a, half_way[2 * k], half_way[2 * k + 1]);
#pragma unroll
    for (int n = k; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t b[4];
      LoadFactorB<kDeltaChunk>(b, inverse, n * 16, k * 16);
      AddPair(result, n, a, b);
    }
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Element at(n, e);
      result[n][e] = at.column < at.row ? -result[n][e] : 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    ChunkGradientKernel(DeltaStage stage, float* dbeta_TN, float scale) {
  extern __shared__ __align__(128) unsigned char shared[];
  const float* const gates = reinterpret_cast<const float*>(shared + kGates);
  float* const rows = reinterpret_cast<float*>(shared + kRows);
  float* const columns = reinterpret_cast<float*>(shared + kColumns);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const GatedDeltaRuleShape& shape = stage.shape;
  const DeltaScratch& scratch = stage.scratch;
  const int64_t tile = blockIdx.x;
  const int head = static_cast<int>(tile % shape.value_heads);
  const DeltaChunk chunk = stage.input.chunks[tile / shape.value_heads];
  const int key_head = head / (shape.value_heads / shape.key_heads);

  LoadTileAsync<kDeltaChunk, kThreads, kDeltaHeadSize>(shared + kWrittenGradient,
                                                       scratch.dwritten + tile * kTokenElements,
                                                       kDeltaChunk, kDeltaHeadSize);
  LoadTileAsync<kDeltaChunk, kThreads, kDeltaHeadSize>(
      shared + kMissing, scratch.missing + tile * kTokenElements, kDeltaChunk, kDeltaHeadSize);
  LoadTileAsync<kDeltaChunk, kThreads, kDeltaChunk>(
      shared + kInverse, scratch.inverse + tile * kSquareElements, kDeltaChunk, kDeltaChunk);
  if (threadIdx.x < kGateRows * kDeltaChunk / 4) {
    CopyPieceAsync(SharedAddressOf(shared + kGates + threadIdx.x * 16),
                   scratch.gates + tile * kGateRows * kDeltaChunk + threadIdx.x * 4, true);
  }
  CommitCopies();
  const int64_t value_stride = int64_t{shape.value_heads} * kDeltaHeadSize;
  LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(
      shared + kOutputGradient,
      scratch.doutput + chunk.first * value_stride + head * kDeltaHeadSize, value_stride,
      chunk.count);
  LoadTileAsync<kDeltaChunk, kThreads, kDeltaHeadSize>(
      shared + kWritten, scratch.written + tile * kTokenElements, kDeltaChunk, kDeltaHeadSize);
  LoadTileAsync<kDeltaChunk, kThreads, kDeltaChunk>(
      shared + kScores, scratch.scores + tile * kSquareElements, kDeltaChunk, kDeltaChunk);
  CommitCopies();

  WaitForCopies<1>();
  __syncthreads();
  float sums[8][4] = {};  // dB.
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    uint32_t a[4];
    LoadFactorATransposed<kDeltaChunk>(a, shared + kWrittenGradient, warp * 16, k * 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t b[4];
      LoadFactorBTransposed<kDeltaChunk>(b, shared + kMissing, n * 16, k * 16);
      AddPair(sums, n, a, b);
    }
  }
  __syncthreads();
  const int64_t key_stride = int64_t{shape.key_heads} * kDeltaHeadSize;
  LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(
      shared + kKey, stage.input.key_TGK + chunk.first * key_stride + key_head * kDeltaHeadSize,
      key_stride, chunk.count);
  CommitCopies();

  float pairs[8][4] = {};  // What D_ij is the exponential's share of.
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float of_beta[2] = {};
    if (n / 2 <= warp) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 inverse = SquarePair(shared + kInverse, Element(n, 2 * half));
        float dinverse[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Element at(n, 2 * half + e);
          const float dwrite =
              at.column <= at.row ? Between(gates, at) * sums[n][2 * half + e] : 0.0f;
          const float beta = gates[kBeta * kDeltaChunk + at.column];
          const float along = dwrite * (e == 0 ? inverse.x : inverse.y);
          of_beta[e] += along;
          pairs[n][2 * half + e] = at.column < at.row ? along * beta : 0.0f;
          dinverse[e] = dwrite * beta;
        }
        const Element at(n, 2 * half);
        *reinterpret_cast<uint32_t*>(shared + kInverseGradient +
                                     PairOffset<kDeltaChunk>(at.row, at.column)) =
            PackHalves(dinverse[0], dinverse[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = SumOverRows(of_beta[e]);
      if (lane < 4) columns[(warp * 2 + kOfBeta) * kDeltaChunk + 8 * n + 2 * lane + e] = sum;
    }
  }

  WaitForCopies<1>();
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;  // dP.
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    uint32_t a[4];
    LoadFactorA<kDeltaHeadSize>(a, shared + kOutputGradient, warp * 16, k * 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t b[4];
      LoadFactorBTransposed<kDeltaChunk>(b, shared + kWritten, n * 16, k * 16);
      AddPair(sums, n, a, b);
    }
  }
  float of_row[2] = {};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float of_column[2] = {};
    if (n / 2 <= warp) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 score = SquarePair(shared + kScores, Element(n, 2 * half));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Element at(n, 2 * half + e);
          float& sum = sums[n][2 * half + e];
          float& pair = pairs[n][2 * half + e];
          if (at.column < at.row) pair += sum * (e == 0 ? score.x : score.y);
          sum = at.column <= at.row ? scale * Between(gates, at) * sum : 0.0f;
          of_row[half] += pair;
          of_column[e] += pair;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = SumOverRows(of_column[e]);
      if (lane < 4) columns[(warp * 2 + kOfSum) * kDeltaChunk + 8 * n + 2 * lane + e] = sum;
    }
  }
  StoreSquare(scratch.scores + tile * kSquareElements, sums);

  float lower[8][4] = {};
  LowerGradient(lower, shared + kInverse, shared + kInverseGradient);
  WaitForCopies<0>();
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;  // k k.T.
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    uint32_t a[4];
    LoadFactorA<kDeltaHeadSize>(a, shared + kKey, warp * 16, k * 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t b[4];
      LoadFactorB<kDeltaHeadSize>(b, shared + kKey, n * 16, k * 16);
      AddPair(sums, n, a, b);
    }
  }
  float of_beta[2] = {};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      of_beta[e / 2] += lower[n][e] * sums[n][e];
      lower[n][e] *= gates[kBeta * kDeltaChunk + Element(n, e).row];
    }
  }
  StoreSquare(scratch.write + tile * kSquareElements, lower);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = SumOverQuad(of_row[half]), beta_sum = SumOverQuad(of_beta[half]);
    const int row = Element(0, 2 * half).row;
    if (lane % 4 == 0) {
      rows[kOfSum * kDeltaChunk + row] = sum;
      rows[kOfBeta * kDeltaChunk + row] = beta_sum;
    }
  }
  __syncthreads();
  const int token = threadIdx.x;
  if (token >= kDeltaChunk) return;
  float of_sum = rows[kOfSum * kDeltaChunk + token], beta_sum = rows[kOfBeta * kDeltaChunk + token];
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    of_sum -= columns[(other * 2 + kOfSum) * kDeltaChunk + token];
    beta_sum += columns[(other * 2 + kOfBeta) * kDeltaChunk + token];
  }
  scratch.dsum[tile * kDeltaChunk + token] = of_sum;
  if (token < chunk.count) {
    dbeta_TN[(chunk.first + token) * shape.value_heads + head] =
        beta_sum / GradientScale(scratch.magnitude[key_head]);
  }
}

}  // namespace

void DeltaChunkGradients(const DeltaStage& stage, const GatedDeltaRuleKernelGradients& gradients,
                         cudaStream_t stream) {
  static_cast<void>(cudaFuncSetAttribute(
      ChunkGradientKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const auto blocks = static_cast<unsigned>(stage.shape.chunks * stage.shape.value_heads);
  ChunkGradientKernel<<<blocks, kThreads, kSharedBytes, stream>>>(
      stage, gradients.beta_TN, 1.0f / sqrtf(static_cast<float>(kDeltaHeadSize)));
  CheckLaunch("DeltaChunkGradients");
}

}  // namespace oom::internal
