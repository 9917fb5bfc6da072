// Hopper's warpgroup matrix product (wgmma) in PTX: both factors bfloat16 in shared memory, in
// boxes as CopyBox leaves them (hopper_tensor_map.cuh). 4 warps together; architecture 90a.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/kernels/hopper_barrier.cuh"

namespace oom::hopper {

// How a factor lies in its row-major matrix: the index that is summed over is the row's (slow) or
// the column's (fast).
enum class Summed { kSlow, kFast };

// Describes boxes `box_bytes` apart, from the address of the first row in the first box.
__device__ __forceinline__ uint64_t FactorDescriptor(uint32_t address, uint32_t box_bytes) {
  constexpr uint64_t kEightRowsBytes = 8 * 128;  // From 8 rows to the next 8: one swizzle pattern.
  constexpr uint64_t kSwizzle128Bytes = 1;
  // In a cluster the upper bits of a block's own addresses name the block.
  const uint32_t in_block = address % (1 << 18);
  return static_cast<uint64_t>(in_block >> 4) | static_cast<uint64_t>(box_bytes >> 4) << 16 |
         (kEightRowsBytes >> 4) << 32 | kSwizzle128Bytes << 62;
}

// A factor of 16 rows, the summed index, and some multiple of 64 columns: a box each 64. `address`
// is a multiple of 1,024, so of 8 rows.
__device__ __forceinline__ uint64_t SlowFactor(uint32_t address, uint32_t box_bytes) {
  return FactorDescriptor(address, box_bytes);
}

// A factor of 16 columns, the summed index: columns 16 * step to 16 * step + 15 of the rows that
// follow each other from `address`, a multiple of 1,024.
__device__ __forceinline__ uint64_t FastFactor(uint32_t address, int step) {
  constexpr int kStepBytes = 32;
  return FactorDescriptor(address + step * kStepBytes, /*box_bytes=*/16);
}

// Before the first product that reads registers or shared memory written by other instructions.
__device__ __forceinline__ void ProductFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products; WaitForProducts<n> waits until at most n groups are unfinished.
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kUnfinished>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kUnfinished) : "memory");
}

// Keeps the compiler from reading the sums before the wait that precedes this.
__device__ __forceinline__ void SumsAreReady(float (&sum)[128]) {
#pragma unroll
  for (float& element : sum) asm volatile("" : "+f"(element)::"memory");
}

#define OOM_WGMMA_4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define OOM_WGMMA_16(s, i) \
  OOM_WGMMA_4(s, i), OOM_WGMMA_4(s, i + 4), OOM_WGMMA_4(s, i + 8), OOM_WGMMA_4(s, i + 12)

// sum [64, 256] = the product of x, 64 by 16, and y, 16 by 256, or `add`s it. Asynchronous.
// Warp w of the four holds rows 16 * w to 16 * w + 15; its lane l the pairs of neighbours
// sum[4 * j], sum[4 * j + 1] at (l / 4, 8 * j + 2 * (l % 4)) and sum[4 * j + 2], sum[4 * j + 3]
// eight rows below.
template <Summed kX, Summed kY>
__device__ __forceinline__ void Product64x256x16(float (&sum)[128], bool add, uint64_t x,
                                                 uint64_t y) {
  // The ones: neither factor negated.
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %132, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127"
      "}, %128, %129, add, 1, 1, %130, %131;\n"
      "}"
      : OOM_WGMMA_16(sum, 0), OOM_WGMMA_16(sum, 16), OOM_WGMMA_16(sum, 32), OOM_WGMMA_16(sum, 48),
        OOM_WGMMA_16(sum, 64), OOM_WGMMA_16(sum, 80), OOM_WGMMA_16(sum, 96), OOM_WGMMA_16(sum, 112)
      : "l"(x), "l"(y), "n"(kX == Summed::kSlow ? 1 : 0), "n"(kY == Summed::kSlow ? 1 : 0),
        "r"(static_cast<uint32_t>(add)));
}

#undef OOM_WGMMA_16
#undef OOM_WGMMA_4

// Stores four 8 x 8 matrices of 16-bit elements to shared memory: lane l has the address of row l %
// 8 of matrix l / 8, and of each matrix the pair of neighbours at (l / 4, 2 * (l % 4)).
__device__ __forceinline__ void StoreMatrices(void* row, const uint32_t (&pairs)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(row)),
      "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
      : "memory");
}

}  // namespace oom::hopper
