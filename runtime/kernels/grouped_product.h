// Products of rows with their experts' weights: for each expert e and each of its rows r,
//   y[r, :] = x[r, :] w[e],  or  y[r, :] = x[r, :] w[e].T  (transposed).
// Shapes: R rows sorted by expert, E experts; x [R, K] and y [R, N]; w [E, K, N], transposed
// [E, N, K]; all bfloat16, contiguous, 16-byte aligned. Expert e has the rows
// [row_end[e - 1], row_end[e]), as at::_grouped_mm takes its offsets; they are read on the device.
// Products are exact and summed in FP32 by the tensor cores, and rounded once to bfloat16. Rows of
// y at and after row_end[E - 1] are left alone. A row of y depends on its row of x alone, not even
// as 0 * NaN on others. Deterministic: nor does it depend on the launch. No scratch. `y` may not
// overlap the others. Thread-safe. REQUIRES: HasHopperTensorCores() (grouped_weight_gradient.h).

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

inline constexpr int64_t kGroupedProductExpertsMax = 512;

struct GroupedProductShape {
  int64_t rows = 0;          // R, at least row_end[E - 1]; fits int32.
  int64_t expert_count = 0;  // E, at most kGroupedProductExpertsMax.
  int64_t x_width = 0;       // K, a positive multiple of 8.
  int64_t y_width = 0;       // N, a multiple of 8.
  bool transposed = false;
};

void GroupedProduct(const GroupedProductShape& shape, const __nv_bfloat16* x_RK,
                    const __nv_bfloat16* w, const int32_t* row_end_E, __nv_bfloat16* y_RN,
                    cudaStream_t stream);

}  // namespace oom
