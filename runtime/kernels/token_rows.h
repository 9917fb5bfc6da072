// Tokens to expert rows and back, on the device. Forward and backward of a mixture:
//   x_RH = x_TH[token_R]: gather of tokens, or of their gradients;
//   y_TH = residual_TH + sum over a token's rows of w * y: combine;
//   dx_TH = sum over a token's rows of dx.
// A token's rows are added one by one in the order of rows_TK, that is by expert. With activations
// in BF16 the combine rounds where the composite operator does: each weighted row, each partial
// sum, the sum with the residual. Sums of gradients are FP32, and at most the result is rounded.
// Shapes: T tokens, K rows a token, R rows, H hidden; rows are contiguous. Rows that are whole,
// aligned 16-byte vectors take the fast path; others are handled element by element.
// Results alias no argument, except that y_TH may be residual_TH. No scratch.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

// out_RH[r] = x[index_R[r]] for r < row_count, or r < *count_on_device where that is not null and
// smaller. x may be mapped host memory.
struct RowGather {
  const int32_t* index_R = nullptr;
  int64_t row_count = 0;
  int64_t hidden_size = 0;
  const int32_t* count_on_device = nullptr;
};

void GatherRows(const RowGather& gather, const __nv_bfloat16* x_TH, __nv_bfloat16* out_RH,
                cudaStream_t stream);
void GatherRows(const RowGather& gather, const float* x_TH, float* out_RH, cudaStream_t stream);

// Each token's K rows.
struct TokenRows {
  const int32_t* rows_TK = nullptr;
  int64_t token_count = 0;
  int64_t rows_per_token = 0;
  int64_t hidden_size = 0;
};

// x_RH[row] = x_TH[t] for each row of token t: the same as GatherRows with token_R, but each token
// is read once, which is nearly half of the traffic.
void SpreadRows(const TokenRows& rows, const __nv_bfloat16* x_TH, __nv_bfloat16* x_RH,
                cudaStream_t stream);
void SpreadRows(const TokenRows& rows, const float* x_TH, float* x_RH, cudaStream_t stream);

// `weight_R` as the combine applies it (RouterChoice::applied_TK, by row). `residual_TH` null:
// none.
void CombineRows(const TokenRows& rows, const __nv_bfloat16* y_RH, const float* weight_R,
                 const __nv_bfloat16* residual_TH, __nv_bfloat16* y_TH, cudaStream_t stream);
void CombineRows(const TokenRows& rows, const float* y_RH, const float* weight_R,
                 const float* residual_TH, float* y_TH, cudaStream_t stream);

void SumTokenRows(const TokenRows& rows, const __nv_bfloat16* dx_RH, float* dx_TH,
                  cudaStream_t stream);
void SumTokenRows(const TokenRows& rows, const __nv_bfloat16* dx_RH, __nv_bfloat16* dx_TH,
                  cudaStream_t stream);
void SumTokenRows(const TokenRows& rows, const float* dx_RH, float* dx_TH, cudaStream_t stream);

}  // namespace oom
