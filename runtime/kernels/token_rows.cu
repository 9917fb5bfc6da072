#include <algorithm>
#include <type_traits>

#include "runtime/base/check.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/row_vector.cuh"
#include "runtime/kernels/token_rows.h"

namespace oom {
namespace {

constexpr int kCopyThreads = 256;
// Vectors that a lane has in flight: 4 x 16 bytes x 2,048 lanes cover the memory's latency.
constexpr int kCopiesInFlight = 4;
constexpr int kMostSumThreads = 256;
// Rows of a token that are loaded before they are added, and the blocks on a multiprocessor that
// registers are spared for. Many threads with few loads each hide the memory's latency better than
// the reverse: of 2, 4 and 8 rows, 2 is as fast or faster for 2 and 8 rows a token.
constexpr int kRowsInFlight = 2;
constexpr int kSumBlocks = 6;

// One warp a row of `units` units.
template <class Unit>
__global__ void __launch_bounds__(kCopyThreads)
    GatherKernel(RowGather gather, int64_t units, const Unit* __restrict__ x_TU,
                 Unit* __restrict__ out_RU) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kCopyThreads / 32) + threadIdx.x / 32;
  if (row >= gather.row_count) return;
  if (gather.count_on_device != nullptr && row >= *gather.count_on_device) return;
  const Unit* from = x_TU + gather.index_R[row] * units;
  Unit* to = out_RU + row * units;
  for (int64_t first = lane; first < units; first += 32 * kCopiesInFlight) {
    Unit unit[kCopiesInFlight];
#pragma unroll
    for (int i = 0; i < kCopiesInFlight; ++i) {
      if (first + 32 * i < units) unit[i] = from[first + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kCopiesInFlight; ++i) {
      if (first + 32 * i < units) to[first + 32 * i] = unit[i];
    }
  }
}

// One warp a token.
template <class Unit>
__global__ void __launch_bounds__(kCopyThreads)
    SpreadKernel(TokenRows rows, int64_t units, const Unit* __restrict__ x_TU,
                 Unit* __restrict__ x_RU) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kCopyThreads / 32) + threadIdx.x / 32;
  if (token >= rows.token_count) return;
  const int32_t* rows_K = rows.rows_TK + token * rows.rows_per_token;
  const Unit* from = x_TU + token * units;
  for (int64_t first = lane; first < units; first += 32 * kCopiesInFlight) {
    Unit unit[kCopiesInFlight];
#pragma unroll
    for (int i = 0; i < kCopiesInFlight; ++i) {
      if (first + 32 * i < units) unit[i] = from[first + 32 * i];
    }
    for (int64_t k = 0; k < rows.rows_per_token; ++k) {
      Unit* to = x_RU + rows_K[k] * units;
#pragma unroll
      for (int i = 0; i < kCopiesInFlight; ++i) {
        if (first + 32 * i < units) to[first + 32 * i] = unit[i];
      }
    }
  }
}

// Calls add(k, vector of the token's k-th row at this thread's columns, the row's weight) in order;
// several loads are under way at a time. Without weights, each is 1.
template <class Vector, class T, class Add>
__device__ void ForEachRow(const TokenRows& rows, int64_t token, int64_t column, const T* x_RH,
                           const float* weight_R, const Add& add) {
  const int count = static_cast<int>(rows.rows_per_token);
  const int32_t* rows_K = rows.rows_TK + token * count;
  for (int first = 0; first < count; first += kRowsInFlight) {
    int32_t row[kRowsInFlight];
    Vector vector[kRowsInFlight];
    float weight[kRowsInFlight];
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      if (first + k < count) row[k] = rows_K[first + k];
    }
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      if (first + k < count) {
        vector[k] = *reinterpret_cast<const Vector*>(x_RH + row[k] * rows.hidden_size + column);
        weight[k] = weight_R == nullptr ? 1.0f : weight_R[row[k]];
      }
    }
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      if (first + k < count) add(first + k, vector[k], weight[k]);
    }
  }
}

// One block a token (x) and a run of columns (y).
template <class T, int kVector>
__global__ void __launch_bounds__(kMostSumThreads, kSumBlocks)
    CombineKernel(TokenRows rows, const T* __restrict__ y_RH, const float* __restrict__ weight_R,
                  const T* residual_TH, T* y_TH) {
  using Vector = RowVector<T, kVector>;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kVector;
  if (column >= rows.hidden_size) return;
  const int64_t token = blockIdx.x;
  const int64_t place = token * rows.hidden_size + column;
  // Loaded before the rows, not behind them.
  Vector residual;
  if (residual_TH != nullptr) residual = *reinterpret_cast<const Vector*>(residual_TH + place);
  float sum[kVector];
  ForEachRow<Vector>(
      rows, token, column, y_RH, weight_R, [&](int k, const Vector& y, float weight) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          // Not contracted to one operation: product and sum are rounded apart.
          const float product = ToFloat(RoundTo<T>(__fmul_rn(y.Get(i), weight)));
          sum[i] = k == 0 ? product : ToFloat(RoundTo<T>(__fadd_rn(sum[i], product)));
        }
      });
  if (residual_TH != nullptr) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = __fadd_rn(sum[i], residual.Get(i));
  }
  Vector result;
  result.Set(sum);
  *reinterpret_cast<Vector*>(y_TH + place) = result;
}

template <class T, class Sum, int kVector>
__global__ void __launch_bounds__(kMostSumThreads, kSumBlocks)
    SumKernel(TokenRows rows, const T* __restrict__ x_RH, Sum* __restrict__ sum_TH) {
  using Vector = RowVector<T, kVector>;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kVector;
  if (column >= rows.hidden_size) return;
  const int64_t token = blockIdx.x;
  float sum[kVector];
  ForEachRow<Vector>(rows, token, column, x_RH, nullptr, [&](int k, const Vector& x, float) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float value = x.Get(i);
      sum[i] = k == 0 ? value : sum[i] + value;
    }
  });
  // FP32 results of BF16 rows are two 16-byte stores.
  constexpr int kPiece = kVector < kWholeVector<Sum> ? kVector : kWholeVector<Sum>;
  Sum* target = sum_TH + token * rows.hidden_size + column;
#pragma unroll
  for (int first = 0; first < kVector; first += kPiece) {
    RowVector<Sum, kPiece> piece;
    piece.Set(sum + first);
    *reinterpret_cast<RowVector<Sum, kPiece>*>(target + first) = piece;
  }
}

unsigned WarpBlocks(int64_t warps) {
  constexpr int kWarps = kCopyThreads / 32;
  return static_cast<unsigned>((warps + kWarps - 1) / kWarps);
}

// Threads for the columns of a token, and blocks.
struct SumLaunch {
  dim3 blocks;
  unsigned threads;
};

SumLaunch SumLaunchFor(const TokenRows& rows, int vector) {
  const int64_t columns = (rows.hidden_size + vector - 1) / vector;
  const int64_t threads = std::min<int64_t>(kMostSumThreads, (columns + 31) / 32 * 32);
  return {.blocks = dim3(static_cast<unsigned>(rows.token_count),
                         static_cast<unsigned>((columns + threads - 1) / threads)),
          .threads = static_cast<unsigned>(threads)};
}

void CheckRows(const TokenRows& rows) {
  OOM_CHECK(rows.token_count >= 0 && rows.token_count <= INT32_MAX);
  OOM_CHECK(rows.rows_per_token > 0 && rows.hidden_size > 0);
}

template <class T>
void Gather(const RowGather& gather, const T* x_TH, T* out_RH, cudaStream_t stream) {
  OOM_CHECK(gather.row_count >= 0 && gather.hidden_size > 0);
  if (gather.row_count == 0) return;
  const int64_t row_bytes = gather.hidden_size * static_cast<int64_t>(sizeof(T));
  const unsigned blocks = WarpBlocks(gather.row_count);
  if (WholeVectors(row_bytes, x_TH, out_RH)) {
    GatherKernel<<<blocks, kCopyThreads, 0, stream>>>(gather, row_bytes / 16,
                                                      reinterpret_cast<const uint4*>(x_TH),
                                                      reinterpret_cast<uint4*>(out_RH));
  } else {
    GatherKernel<<<blocks, kCopyThreads, 0, stream>>>(gather, gather.hidden_size, x_TH, out_RH);
  }
  CheckLaunch("GatherRows");
}

template <class T>
void Spread(const TokenRows& rows, const T* x_TH, T* x_RH, cudaStream_t stream) {
  CheckRows(rows);
  if (rows.token_count == 0) return;
  const int64_t row_bytes = rows.hidden_size * static_cast<int64_t>(sizeof(T));
  const unsigned blocks = WarpBlocks(rows.token_count);
  if (WholeVectors(row_bytes, x_TH, x_RH)) {
    SpreadKernel<<<blocks, kCopyThreads, 0, stream>>>(
        rows, row_bytes / 16, reinterpret_cast<const uint4*>(x_TH), reinterpret_cast<uint4*>(x_RH));
  } else {
    SpreadKernel<<<blocks, kCopyThreads, 0, stream>>>(rows, rows.hidden_size, x_TH, x_RH);
  }
  CheckLaunch("SpreadRows");
}

// Calls launch(elements of a vector, as std::integral_constant).
template <class T, class Launch>
void WithVector(bool whole, const Launch& launch) {
  if (whole) {
    launch(std::integral_constant<int, kWholeVector<T>>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
}

template <class T>
void Combine(const TokenRows& rows, const T* y_RH, const float* weight_R, const T* residual_TH,
             T* y_TH, cudaStream_t stream) {
  CheckRows(rows);
  if (rows.token_count == 0) return;
  const int64_t row_bytes = rows.hidden_size * static_cast<int64_t>(sizeof(T));
  WithVector<T>(WholeVectors(row_bytes, y_RH, residual_TH, y_TH), [&](auto vector) {
    const SumLaunch launch = SumLaunchFor(rows, vector());
    CombineKernel<T, vector()>
        <<<launch.blocks, launch.threads, 0, stream>>>(rows, y_RH, weight_R, residual_TH, y_TH);
  });
  CheckLaunch("CombineRows");
}

template <class T, class Sum>
void SumRows(const TokenRows& rows, const T* x_RH, Sum* sum_TH, cudaStream_t stream) {
  CheckRows(rows);
  if (rows.token_count == 0) return;
  const int64_t row_bytes = rows.hidden_size * static_cast<int64_t>(sizeof(T));
  WithVector<T>(WholeVectors(row_bytes, x_RH, sum_TH), [&](auto vector) {
    const SumLaunch launch = SumLaunchFor(rows, vector());
    SumKernel<T, Sum, vector()><<<launch.blocks, launch.threads, 0, stream>>>(rows, x_RH, sum_TH);
  });
  CheckLaunch("SumTokenRows");
}

}  // namespace

void GatherRows(const RowGather& gather, const __nv_bfloat16* x_TH, __nv_bfloat16* out_RH,
                cudaStream_t stream) {
  Gather(gather, x_TH, out_RH, stream);
}

void GatherRows(const RowGather& gather, const float* x_TH, float* out_RH, cudaStream_t stream) {
  Gather(gather, x_TH, out_RH, stream);
}

void SpreadRows(const TokenRows& rows, const __nv_bfloat16* x_TH, __nv_bfloat16* x_RH,
                cudaStream_t stream) {
  Spread(rows, x_TH, x_RH, stream);
}

void SpreadRows(const TokenRows& rows, const float* x_TH, float* x_RH, cudaStream_t stream) {
  Spread(rows, x_TH, x_RH, stream);
}

void CombineRows(const TokenRows& rows, const __nv_bfloat16* y_RH, const float* weight_R,
                 const __nv_bfloat16* residual_TH, __nv_bfloat16* y_TH, cudaStream_t stream) {
  Combine(rows, y_RH, weight_R, residual_TH, y_TH, stream);
}

void CombineRows(const TokenRows& rows, const float* y_RH, const float* weight_R,
                 const float* residual_TH, float* y_TH, cudaStream_t stream) {
  Combine(rows, y_RH, weight_R, residual_TH, y_TH, stream);
}

void SumTokenRows(const TokenRows& rows, const __nv_bfloat16* dx_RH, float* dx_TH,
                  cudaStream_t stream) {
  SumRows(rows, dx_RH, dx_TH, stream);
}

void SumTokenRows(const TokenRows& rows, const __nv_bfloat16* dx_RH, __nv_bfloat16* dx_TH,
                  cudaStream_t stream) {
  SumRows(rows, dx_RH, dx_TH, stream);
}

void SumTokenRows(const TokenRows& rows, const float* dx_RH, float* dx_TH, cudaStream_t stream) {
  SumRows(rows, dx_RH, dx_TH, stream);
}

}  // namespace oom
