// The second half of a weight gradient: rows of FP32 partial sums added up.
//   sum[c] += p[0][c] + p[1][c] + ...
// 32 strided sums a column, then these in order: a fixed order for a given number of rows.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

void AddPartialRows(const float* partials_PC, int64_t rows, int64_t columns, float* sum_C,
                    cudaStream_t stream);

}  // namespace oom
