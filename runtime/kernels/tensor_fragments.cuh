// Products of 16-bit tiles in shared memory by mma.sync m16n8k16: FP16 factors, FP32 sums. A warp's
// lane l holds of a 16 x 8 sum the elements (l / 4, 2 (l % 4) + {0, 1}), then those eight rows
// below; what it holds of the two sums beside each other, rounded in pairs, is a 16 x 16 factor A.
// So a product's result is the next product's factor without leaving the registers. FP16 rather
// than BF16: the same speed, and an eighth of the rounding error. Device code, internal to this
// folder.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "runtime/kernels/mma_instructions.cuh"

namespace oom::internal {

// A tile's rows lie one after another, each of kColumns elements. The 16-byte pieces of a row are
// permuted, so that eight rows' pieces of the same columns lie in different banks.
template <int kColumns>
__device__ __forceinline__ int PiecePermutation(int row) {
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 128);
  return kColumns == 32 ? (row >> 1) & 3 : row & 7;
}

// Of the element pair at an even column.
template <int kColumns>
__device__ __forceinline__ int PairOffset(int row, int column) {
  return row * kColumns * 2 + (((column >> 3) ^ PiecePermutation<kColumns>(row)) << 4) +
         (column & 7) * 2;
}

// Of the piece of row `row + lane_row` at column `column + 8 * lane_piece`: `row` is a multiple of
// 8 and `column` of 16, constants after unrolling; the rest depends on the lane alone.
template <int kColumns>
__device__ __forceinline__ int PieceOffset(int row, int lane_row, int column, int lane_piece) {
  return (row + lane_row) * kColumns * 2 +
         ((column * 2) ^ ((lane_piece ^ PiecePermutation<kColumns>(lane_row)) << 4));
}

// Zero, which the compiler does not know: addresses that depend on it are made where they are used,
// rather than before a loop and kept in registers.
__device__ __forceinline__ int UnknownZero() {
  int zero;
  asm volatile("mov.s32 %0, 0;" : "=r"(zero));
  return zero;
}

__device__ __forceinline__ uint32_t PackHalves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float2 UnpackHalves(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

__device__ __forceinline__ float2 UnpackBfloat16(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}

__device__ __forceinline__ uint32_t PackBfloat16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The factor A whose columns are those of two neighbouring sums.
__device__ __forceinline__ void FactorOfSums(uint32_t (&a)[4], const float (&left)[4],
                                             const float (&right)[4]) {
  a[0] = PackHalves(left[0], left[1]);
  a[1] = PackHalves(left[2], left[3]);
  a[2] = PackHalves(right[0], right[1]);
  a[3] = PackHalves(right[2], right[3]);
}

// A [16 x 16] from row m and column k of a tile of A, or of its transpose.
template <int kColumns>
__device__ __forceinline__ void LoadFactorA(uint32_t (&a)[4], const unsigned char* tile, int m,
                                            int k) {
  const int lane = threadIdx.x % 32;
  const unsigned char* const row = tile + PieceOffset<kColumns>(m, lane % 16, k, lane / 16);
  LoadMatrices(a, SharedAddressOf(row));
}
template <int kColumns>
__device__ __forceinline__ void LoadFactorATransposed(uint32_t (&a)[4], const unsigned char* tile,
                                                      int m, int k) {
  const int lane = threadIdx.x % 32;
  const unsigned char* const row =
      tile + PieceOffset<kColumns>(k, lane / 16 * 8 + lane % 8, m, lane / 8 % 2);
  LoadMatricesTransposed(a, SharedAddressOf(row));
}

// B [16 x 16] from row k and column n, as two factors [16 x 8]: b[0], b[1] and b[2], b[3]. The
// tile holds B.T (rows are n), or B (rows are k).
template <int kColumns>
__device__ __forceinline__ void LoadFactorB(uint32_t (&b)[4], const unsigned char* tile, int n,
                                            int k) {
  const int lane = threadIdx.x % 32;
  const unsigned char* const row =
      tile + PieceOffset<kColumns>(n, lane / 16 * 8 + lane % 8, k, lane / 8 % 2);
  LoadMatrices(b, SharedAddressOf(row));
}
template <int kColumns>
__device__ __forceinline__ void LoadFactorBTransposed(uint32_t (&b)[4], const unsigned char* tile,
                                                      int n, int k) {
  const int lane = threadIdx.x % 32;
  const unsigned char* const row = tile + PieceOffset<kColumns>(k, lane % 16, n, lane / 16);
  LoadMatricesTransposed(b, SharedAddressOf(row));
}

// The lanes 4i to 4i + 3 hold a 4 x 4 matrix of words, one column each; then one row each.
__device__ __forceinline__ void TransposeQuad(uint32_t (&word)[4]) {
  const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? word[i] : word[i + 1], 1);
    word[i] = odd ? other : word[i];
    word[i + 1] = odd ? word[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? word[i] : word[i + 2], 2);
    word[i] = upper ? other : word[i];
    word[i + 2] = upper ? word[i + 2] : other;
  }
}

// Writes a row's 32 columns of 16-bit elements: `word[i]` is the lane's pair of columns
// 8 i + 2 (lane % 4). All lanes of the warp must call it.
__device__ __forceinline__ void StoreRowOfSums(void* row, uint32_t w0, uint32_t w1, uint32_t w2,
                                               uint32_t w3) {
  uint32_t word[4] = {w0, w1, w2, w3};
  TransposeQuad(word);
  reinterpret_cast<uint4*>(row)[threadIdx.x % 4] = make_uint4(word[0], word[1], word[2], word[3]);
}

// Starts copying `kRows` rows of kColumns 16-bit elements, of which the first `valid_rows` exist;
// the others become zeros. By all kThreads threads of a block.
template <int kColumns, int kThreads, int kRows>
__device__ __forceinline__ void LoadTileAsync(unsigned char* tile, const void* source,
                                              int64_t row_stride_elements, int valid_rows) {
  constexpr int kPieces = kColumns / 8;
  static_assert(kRows * kPieces % kThreads == 0);
#pragma unroll 4
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x;
    const int row = index / kPieces, piece = index % kPieces;
    const bool valid = row < valid_rows;
    const char* from =
        static_cast<const char*>(source) + (valid ? row * row_stride_elements * 2 : 0) + piece * 16;
    unsigned char* const to =
        tile + row * kColumns * 2 + ((piece ^ PiecePermutation<kColumns>(row)) << 4);
    CopyPieceAsync(SharedAddressOf(to), from, valid);
  }
}

}  // namespace oom::internal
