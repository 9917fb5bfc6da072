// mma.sync m16n8k16 in PTX, and what feeds it: cp.async, ldmatrix, movmatrix. One function an
// instruction; architectures from 80 on. Places in shared memory are given by SharedAddressOf,
// which a kernel may call once and add to. All is volatile: what a whole warp must execute is not
// to be moved behind a lane's condition. Device code, internal to this folder.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace oom::internal {

__device__ __forceinline__ uint32_t SharedAddressOf(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory, or zeros if not `valid`; `source` must be readable either way.
__device__ __forceinline__ void CopyPieceAsync(uint32_t to_address, const void* source,
                                               bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_address), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kUnfinished>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kUnfinished) : "memory");
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrices(uint32_t (&matrix)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row_address)
               : "memory");
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&matrix)[4],
                                                       uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row_address)
               : "memory");
}

// Of an 8 x 8 matrix in registers.
__device__ __forceinline__ uint32_t Transposed(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// sum [16, 8] += a [16, 16] b [16, 8], of FP16 factors. A lane has four elements of the sum.
__device__ __forceinline__ void MultiplyAdd(float* sum, const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of BF16 factors.
__device__ __forceinline__ void MultiplyAddBfloat16(float* sum, const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace oom::internal
