// Copies of boxes of a matrix between device and shared memory by Hopper's copy engine (TMA). A box
// is some rows of 128 bytes: rows adjacent, the 16-byte pieces of row r permuted by XOR with r % 8
// (the 128-byte swizzle, which wgmma undoes). A box starts at a multiple of kBoxAlignment. What
// lies outside the matrix is read as zeros and not written.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "runtime/base/check.h"
#include "runtime/kernels/hopper_barrier.cuh"

namespace oom::hopper {

inline constexpr int kBoxRowBytes = 128;
inline constexpr int kBoxAlignment = 1024;

// `matrices` matrices of one size, in elements. Strides are multiples of 16 bytes.
struct MatrixShape {
  int64_t matrices = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t matrix_stride = 0;
};

// Boxes of `box_rows` (at most 256) rows. A kernel takes the map as a parameter of type
// `const __grid_constant__ CUtensorMap`.
template <class Element>
CUtensorMap MakeTensorMap(const Element* first, const MatrixShape& shape, int box_rows) {
  static_assert(std::is_same_v<Element, float> || std::is_same_v<Element, __nv_bfloat16>);
  // Asked of the runtime, so that nothing links the driver's library.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    OOM_CHECK(error == cudaSuccess && found == cudaDriverEntryPointSuccess);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(shape.columns),
                               static_cast<cuuint64_t>(shape.rows),
                               static_cast<cuuint64_t>(shape.matrices)};
  const cuuint64_t stride_bytes[2] = {
      static_cast<cuuint64_t>(shape.row_stride) * sizeof(Element),
      static_cast<cuuint64_t>(shape.matrix_stride) * sizeof(Element)};
  const cuuint32_t box[3] = {kBoxRowBytes / sizeof(Element), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  constexpr CUtensorMapDataType kType = std::is_same_v<Element, float>
                                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult result =
      encode(&map, kType, 3, const_cast<Element*>(first), sizes, stride_bytes, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  OOM_CHECK(result == CUDA_SUCCESS);
  return map;
}

// Starts the copy of the box at (matrix, row, column); its bytes count at `barrier`. One thread.
__device__ __forceinline__ void CopyBox(const CUtensorMap* map, void* box, uint64_t* barrier,
                                        int matrix, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(SharedAddress(box)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(SharedAddress(barrier))
      : "memory");
}

// The same into every block of the cluster whose bit in `blocks` is set, at the same place, with
// the bytes counted at each one's own barrier.
__device__ __forceinline__ void CopyBoxToBlocks(const CUtensorMap* map, void* box,
                                                uint64_t* barrier, int matrix, int row, int column,
                                                uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(SharedAddress(box)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(SharedAddress(barrier)), "h"(blocks)
      : "memory");
}

// Starts reading the box at (matrix, row, column) into the L2 cache. One thread.
__device__ __forceinline__ void PrefetchBox(const CUtensorMap* map, int matrix, int row,
                                            int column) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
               "r"(column), "r"(row), "r"(matrix)
               : "memory");
}

// Starts writing a box of shared memory to (matrix, row, column), or adding it there. One thread,
// after FenceAsyncProxy in the threads that filled the box.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, const void* box, int matrix,
                                         int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(column), "r"(row), "r"(matrix), "r"(SharedAddress(box))
      : "memory");
}
__device__ __forceinline__ void AddBox(const CUtensorMap* map, const void* box, int matrix, int row,
                                       int column) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(column), "r"(row), "r"(matrix), "r"(SharedAddress(box))
      : "memory");
}

// Ends a group of the thread's StoreBox and AddBox calls.
__device__ __forceinline__ void CommitBoxes() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `kUnread` of the thread's groups have not left shared memory yet.
template <int kUnread>
__device__ __forceinline__ void WaitForBoxReads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kUnread) : "memory");
}

// Waits until all of the thread's groups are written.
__device__ __forceinline__ void WaitForBoxes() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace oom::hopper
