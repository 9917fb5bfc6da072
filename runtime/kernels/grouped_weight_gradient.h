// Weight gradients of routed experts, the one grouped product that LibTorch lacks in FP32: for each
// expert e, over its rows r in rising order,
//   d[e] = sum_r x[r, :].T y[r, :],  or  d[e] += that sum  (accumulate).
// Shapes: R rows sorted by expert, E experts; x [R, M] and y [R, N] bfloat16, contiguous, 16-byte
// aligned; d [E, M, N] float, 16-byte aligned. Expert e has the rows [row_end[e - 1], row_end[e]),
// as at::_grouped_mm takes its offsets; they are read on the device, so the host never knows them.
// Products are exact and summed in FP32 by the tensor cores, which do not round sums to nearest:
// the relative error grows by about 1e-9 a row. With `accumulate` the finished sum is added once,
// rounded to nearest. Nothing is rounded to bfloat16. An expert without rows: zeros, or with
// `accumulate` untouched. Rows at and after row_end[E - 1], and other experts' rows, never enter,
// not even as 0 * NaN. Deterministic: a sum depends on its expert's rows alone, not on the launch
// or other experts. No scratch. `d` may not overlap `x`, `y` or `row_end`. Thread-safe.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

inline constexpr int64_t kGroupedExpertsMax = 1024;

struct GroupedWeightGradientShape {
  int64_t rows = 0;             // R, at least row_end[E - 1]; fits int32.
  int64_t expert_count = 0;     // E, at most kGroupedExpertsMax.
  int64_t x_width = 0;          // M, a multiple of 8.
  int64_t y_width = 0;          // N, a multiple of 8.
  int64_t d_row_stride = 0;     // Elements between rows of d[e]; a multiple of 4, at least N.
  int64_t d_expert_stride = 0;  // Elements between experts of d; a multiple of d_row_stride.
};

struct GroupedWeightGradientOptions {
  bool accumulate = false;
  bool hopper = false;  // wgmma and TMA instead of mma.sync; needs HasHopperTensorCores().
};

// Whether the current device runs code of architecture 90a.
bool HasHopperTensorCores();

void GroupedWeightGradient(const GroupedWeightGradientShape& shape,
                           const GroupedWeightGradientOptions& options, const __nv_bfloat16* x_RM,
                           const __nv_bfloat16* y_RN, const int32_t* row_end_E, float* d_EMN,
                           cudaStream_t stream);

}  // namespace oom
