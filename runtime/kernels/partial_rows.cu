#include "runtime/kernels/launch.h"
#include "runtime/kernels/partial_rows.h"

namespace oom {
namespace {

constexpr int kColumns = 32;
constexpr int kStrides = 32;

__global__ void AddPartialRowsKernel(const float* partials_PC, int64_t rows, int64_t columns,
                                     float* sum_C) {
  __shared__ float sums[kStrides][kColumns];
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 16
    for (int64_t row = threadIdx.y; row < rows; row += kStrides) {
      sum += partials_PC[row * columns + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int stride = 1; stride < kStrides; ++stride) sum += sums[stride][threadIdx.x];
  sum_C[column] += sum;
}

}  // namespace

void AddPartialRows(const float* partials_PC, int64_t rows, int64_t columns, float* sum_C,
                    cudaStream_t stream) {
  if (columns == 0 || rows == 0) return;
  const auto blocks = static_cast<unsigned>((columns + kColumns - 1) / kColumns);
  AddPartialRowsKernel<<<blocks, dim3(kColumns, kStrides), 0, stream>>>(partials_PC, rows, columns,
                                                                        sum_C);
  CheckLaunch("AddPartialRows");
}

}  // namespace oom
