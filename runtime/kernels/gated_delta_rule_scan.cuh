// What the two passes through a document's chunks share. A warp has 16 columns of v and nothing to
// do with other warps but that they read the same tiles: it holds the transpose of a state, [16,
// K], and everything else transposed too, so that each product's result is the next one's factor.
// Device code, internal to this folder.

#pragma once

#include "runtime/kernels/gated_delta_rule_stages.h"
#include "runtime/kernels/tensor_fragments.cuh"

namespace oom::internal {

inline constexpr int kTileBytes = kTokenElements * 2;
inline constexpr int kSquareBytes = kSquareElements * 2;
inline constexpr int kGateBytes = kGateRows * kDeltaChunk * 4;
// Where a block's tiles lie in shared memory. Those of a chunk fill a stage, of which there are
// two: while one chunk is worked on, the next one's are under way. q's tile is apart and has one
// place.
template <int kWarps>
struct ScanLayout {
  static constexpr int kColumns = 16 * kWarps;
  static constexpr int kValueBytes = kDeltaChunk * kColumns * 2;
  static constexpr int kQuery = 0;
  static constexpr int kStage = kQuery + kTileBytes;
  static constexpr int kKey = 0;  // Within a stage.
  static constexpr int kWrite = kKey + kTileBytes;
  static constexpr int kScores = kWrite + kSquareBytes;
  static constexpr int kValue = kScores + kSquareBytes;
  static constexpr int kGates = kValue + kValueBytes;
  static constexpr int kStageBytes = kGates + kGateBytes;
  static constexpr int kBytes = kStage + 2 * kStageBytes;
};

// A warp's rows of v in a tile [V, 64]: `sums` as pairs of tokens.
__device__ __forceinline__ void StoreTokens(__half* tile, int first_v, const uint32_t (&low)[8],
                                            const uint32_t (&high)[8]) {
  __half* const row = tile + (first_v + threadIdx.x % 32 / 4) * kDeltaChunk;
  StoreRowOfSums(row, low[0], low[1], low[2], low[3]);
  StoreRowOfSums(row + 32, low[4], low[5], low[6], low[7]);
  StoreRowOfSums(row + 8 * kDeltaChunk, high[0], high[1], high[2], high[3]);
  StoreRowOfSums(row + 8 * kDeltaChunk + 32, high[4], high[5], high[6], high[7]);
}

__device__ __forceinline__ void StoreTokens(__half* tile, int first_v, const uint32_t (&a)[4][4]) {
  const uint32_t low[8] = {a[0][0], a[0][2], a[1][0], a[1][2], a[2][0], a[2][2], a[3][0], a[3][2]};
  const uint32_t high[8] = {a[0][1], a[0][3], a[1][1], a[1][3], a[2][1], a[2][3], a[3][1], a[3][3]};
  StoreTokens(tile, first_v, low, high);
}

// A warp's rows of a state [V, K] as the factor of a product.
__device__ __forceinline__ void StoreState(__half* state, int first_v, const uint32_t (&a)[8][4]) {
  __half* const row = state + (first_v + threadIdx.x % 32 / 4) * kDeltaHeadSize;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    StoreRowOfSums(row + part * 32, a[2 * part][0], a[2 * part][2], a[2 * part + 1][0],
                   a[2 * part + 1][2]);
    StoreRowOfSums(row + 8 * kDeltaHeadSize + part * 32, a[2 * part][1], a[2 * part][3],
                   a[2 * part + 1][1], a[2 * part + 1][3]);
  }
}

// S.T of 16 columns of v from and to [K, V].
__device__ __forceinline__ void LoadState(float (&state)[16][4], const float* from_KV,
                                          float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * (lane % 4) + e % 2, v = lane / 4 + e / 2 * 8;
      state[n][e] = from_KV == nullptr ? 0.0f : factor * from_KV[k * kDeltaHeadSize + v];
    }
  }
}
__device__ __forceinline__ void StoreWideState(float* to_KV, const float (&state)[16][4],
                                               float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * (lane % 4) + e % 2, v = lane / 4 + e / 2 * 8;
      to_KV[k * kDeltaHeadSize + v] = factor * state[n][e];
    }
  }
}

// sums [16, 64] += a [16, 128] times the transpose of `rows` [64, 128].
__device__ __forceinline__ void AddProductWithRows(float (&sums)[8][4], const uint32_t (&a)[8][4],
                                                   const unsigned char* rows) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      LoadFactorB<kDeltaHeadSize>(b, rows, n * 16, k * 16);
      MultiplyAdd(sums[2 * n], a[k], b[0], b[1]);
      MultiplyAdd(sums[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

// sums [16, 128] += a [16, 64] times `rows` [64, 128].
__device__ __forceinline__ void AddProductOverRows(float (&sums)[16][4], const uint32_t (&a)[4][4],
                                                   const unsigned char* rows) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      uint32_t b[4];
      LoadFactorBTransposed<kDeltaHeadSize>(b, rows, n * 16, k * 16);
      MultiplyAdd(sums[2 * n], a[k], b[0], b[1]);
      MultiplyAdd(sums[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

// sums [16, 64] += a [16, 64] times the transpose of the lower triangle `square`.
__device__ __forceinline__ void AddProductWithLowerTransposed(float (&sums)[8][4],
                                                              const uint32_t (&a)[4][4],
                                                              const unsigned char* square) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = k; n < 4; ++n) {
      uint32_t b[4];
      LoadFactorB<kDeltaChunk>(b, square, n * 16, k * 16);
      MultiplyAdd(sums[2 * n], a[k], b[0], b[1]);
      MultiplyAdd(sums[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

// sums [16, 64] += a [16, 64] times the lower triangle `square`.
__device__ __forceinline__ void AddProductWithLower(float (&sums)[8][4], const uint32_t (&a)[4][4],
                                                    const unsigned char* square) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 0; n <= k; ++n) {
      uint32_t b[4];
      LoadFactorBTransposed<kDeltaChunk>(b, square, n * 16, k * 16);
      MultiplyAdd(sums[2 * n], a[k], b[0], b[1]);
      MultiplyAdd(sums[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

// The lane's two tokens of n-th eight.
__device__ __forceinline__ float2 GatePair(const unsigned char* gates, GateRow row, int n) {
  return reinterpret_cast<const float2*>(gates)[(row * kDeltaChunk + 8 * n) / 2 + threadIdx.x % 4];
}

__device__ __forceinline__ void ScaleTokens(float (&sums)[8][4], const unsigned char* gates,
                                            GateRow row, float factor) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 gate = GatePair(gates, row, n);
    sums[n][0] *= factor * gate.x;
    sums[n][1] *= factor * gate.y;
    sums[n][2] *= factor * gate.x;
    sums[n][3] *= factor * gate.y;
  }
}

__device__ __forceinline__ void Factors(uint32_t (&a)[4][4], const float (&sums)[8][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) FactorOfSums(a[k], sums[2 * k], sums[2 * k + 1]);
}

__device__ __forceinline__ void Factors(uint32_t (&a)[8][4], const float (&sums)[16][4]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) FactorOfSums(a[k], sums[2 * k], sums[2 * k + 1]);
}

// What a block works on.
template <int kWarps>
struct ScanPlace {
  __device__ __forceinline__ explicit ScanPlace(const GatedDeltaRuleShape& shape) {
    constexpr int kSplits = kDeltaHeadSize / (16 * kWarps);
    first_v = static_cast<int>(blockIdx.x % kSplits) * 16 * kWarps;
    head = static_cast<int>(blockIdx.x / kSplits % shape.value_heads);
    document = blockIdx.x / kSplits / shape.value_heads;
    key_head = head / (shape.value_heads / shape.key_heads);
    key_stride = int64_t{shape.key_heads} * kDeltaHeadSize;
    value_stride = int64_t{shape.value_heads} * kDeltaHeadSize;
  }
  __device__ __forceinline__ int64_t Key(const DeltaChunk& chunk) const {
    return chunk.first * key_stride + key_head * kDeltaHeadSize;
  }
  __device__ __forceinline__ int64_t Value(const DeltaChunk& chunk) const {
    return chunk.first * value_stride + head * kDeltaHeadSize + first_v;
  }

  int first_v;
  int head;
  int key_head;
  int64_t document;
  int64_t key_stride;
  int64_t value_stride;
};

// Starts all copies of a chunk but q's. `value` is v or do, 16-bit either way.
template <int kWarps>
__device__ __forceinline__ void LoadStage(const DeltaStage& stage, const ScanPlace<kWarps>& place,
                                          int64_t chunk_index, const void* value_TNV,
                                          bool with_scores, unsigned char* memory) {
  using L = ScanLayout<kWarps>;
  constexpr int kThreads = 32 * kWarps;
  const DeltaChunk chunk = stage.input.chunks[chunk_index];
  const int64_t tile = chunk_index * stage.shape.value_heads + place.head;
  LoadTileAsync<kDeltaHeadSize, kThreads, kDeltaChunk>(
      memory + L::kKey, stage.input.key_TGK + place.Key(chunk), place.key_stride, chunk.count);
  LoadTileAsync<kDeltaChunk, kThreads, kDeltaChunk>(
      memory + L::kWrite, stage.scratch.write + tile * kSquareElements, kDeltaChunk, kDeltaChunk);
  if (with_scores) {
    LoadTileAsync<kDeltaChunk, kThreads, kDeltaChunk>(memory + L::kScores,
                                                      stage.scratch.scores + tile * kSquareElements,
                                                      kDeltaChunk, kDeltaChunk);
  }
  LoadTileAsync<L::kColumns, kThreads, kDeltaChunk>(
      memory + L::kValue, static_cast<const __half*>(value_TNV) + place.Value(chunk),
      place.value_stride, chunk.count);
  const float* gates = stage.scratch.gates + tile * kGateRows * kDeltaChunk;
  for (int piece = threadIdx.x; piece < kGateBytes / 16; piece += kThreads) {
    CopyPieceAsync(SharedAddressOf(memory + L::kGates + piece * 16), gates + piece * 4, true);
  }
}

template <int kWarps>
__device__ __forceinline__ void LoadQueries(const DeltaStage& stage, const ScanPlace<kWarps>& place,
                                            int64_t chunk_index, unsigned char* memory) {
  const DeltaChunk chunk = stage.input.chunks[chunk_index];
  LoadTileAsync<kDeltaHeadSize, 32 * kWarps, kDeltaChunk>(
      memory, stage.input.query_TGK + place.Key(chunk), place.key_stride, chunk.count);
}

// Blocks of four warps read each tile half as often as blocks of two, which spread few heads over
// more multiprocessors: 64 blocks of four warps, one sequence of 32 heads, leave half of 132 idle.
inline bool ScanTakesFourWarps(const GatedDeltaRuleShape& shape) {
  return shape.documents * shape.value_heads * (kDeltaHeadSize / 64) >= 132;
}

// Launches `kernel`, an instance for kWarps, with a block for every document, head and columns of
// v.
template <int kWarps, class Kernel, class... Arguments>
void LaunchScan(Kernel kernel, const GatedDeltaRuleShape& shape, cudaStream_t stream,
                const Arguments&... arguments) {
  static_cast<void>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         ScanLayout<kWarps>::kBytes));
  const int64_t blocks =
      shape.documents * shape.value_heads * (kDeltaHeadSize / ScanLayout<kWarps>::kColumns);
  kernel<<<static_cast<unsigned>(blocks), 32 * kWarps, ScanLayout<kWarps>::kBytes, stream>>>(
      arguments...);
}

}  // namespace oom::internal
