// Rows by expert on the device: a stable counting sort of the (token, choice) pairs by expert.
//   first_row_E1[e] .. first_row_E1[e + 1] are expert e's rows, so first_row_E1[0] = 0 and
//   first_row_E1[E] = R; first_row_E1 + 1 is what at::_grouped_mm takes as `offs`.
//   pair_R[r] = token * K + choice of row r, rising within an expert;  token_R[r] = pair_R[r] / K;
//   rows_TK[t] = the rows of token t, rising, so in expert order.
// Counts are integers and every place follows from them: the result does not depend on the launch.
// Shapes: T tokens, K <= 16 choices, E <= 512 experts, R = T * K < 2^31 rows. Results do not alias.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct ExpertGroupShape {
  int64_t token_count = 0;
  int expert_count = 0;
  int experts_per_token = 0;
};

struct ExpertGroupArrays {
  int32_t* first_row_E1 = nullptr;  // [E + 1]
  int32_t* pair_R = nullptr;
  int32_t* token_R = nullptr;
  int32_t* rows_TK = nullptr;
};

int64_t ExpertGroupScratchBytes(const ExpertGroupShape& shape);

// REQUIRES: 0 <= expert_TK < E. `scratch` is aligned to 4 bytes.
void GroupRowsByExpert(const ExpertGroupShape& shape, const int32_t* expert_TK,
                       const ExpertGroupArrays& groups, void* scratch, cudaStream_t stream);

// value_R[r] = value_TK[pair_R[r]], as for the weights that rows are multiplied by.
void PairsToRows(const int32_t* pair_R, int64_t row_count, const float* value_TK, float* value_R,
                 cudaStream_t stream);

// value_TK[pair_R[r]] = value_R[r], as for the weights' gradients.
void RowsToPairs(const int32_t* pair_R, int64_t row_count, const float* value_R, float* value_TK,
                 cudaStream_t stream);

// sum_E[e] += the sum over expert e's rows of a_R * b_R, FP32. The order of summation follows from
// the number of its rows.
void AddProductsByExpert(const int32_t* first_row_E1, int expert_count, const float* a_R,
                         const float* b_R, float* sum_E, cudaStream_t stream);

}  // namespace oom
