// Embedding on the device: y_t = W[token_t]; the gradient of row v is the sum of dy_t over the
// tokens t with token_t = v, added in token order in FP32. A batch's tokens are grouped once: row_U
// are the distinct tokens, rising, U of them (a number that stays on the device), and each row's
// tokens lie together, in token order. With that
//   forward, by row: GatherRows(row_U, *count) from the host's array to a staging of U rows, then
//                    EmbeddingForward from the staging with index_T;
//   forward, resident: EmbeddingForward with the tokens themselves;
//   backward: EmbeddingBackward, to U rows or into a resident gradient.
// Shapes: T < 2^31 tokens, V vocabulary, H hidden. Results alias no argument.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

// Capacities in brackets. All are written by GroupTokens but for the parts beyond U.
struct TokenGroups {
  int32_t* count = nullptr;           // [1] U
  int32_t* row_U = nullptr;           // [T]
  int32_t* first_U = nullptr;         // [T] row u's tokens begin at position_T[first_U[u]].
  int32_t* position_T = nullptr;      // [T] tokens' positions, by token, then rising.
  int32_t* index_T = nullptr;         // [T] token_T[t] = row_U[index_T[t]]. Null: not written.
  int32_t* frequent_count = nullptr;  // [1] Rows with many tokens, which backward treats apart,
  int32_t* frequent = nullptr;        // [FrequentRows(T)] as indices into row_U, in any order.
};

int64_t FrequentRows(int64_t token_count);

// REQUIRES: a current device.
int64_t GroupTokensScratchBytes(int64_t token_count);

// REQUIRES: 0 <= token_T < vocabulary_size. `scratch` is aligned to 256 bytes.
void GroupTokens(const int32_t* token_T, int64_t token_count, int64_t vocabulary_size,
                 const TokenGroups& groups, void* scratch, cudaStream_t stream);

// y_TH[t] = weight[index_T[t]]; `weight` may be mapped host memory.
void EmbeddingForward(const __nv_bfloat16* weight_VH, const int32_t* index_T, int64_t token_count,
                      int64_t hidden_size, __nv_bfloat16* y_TH, cudaStream_t stream);
void EmbeddingForward(const float* weight_VH, const int32_t* index_T, int64_t token_count,
                      int64_t hidden_size, float* y_TH, cudaStream_t stream);

struct EmbeddingShape {
  int64_t token_count = 0;
  int64_t hidden_size = 0;
};

// sum_UH[u] = the sum for row_U[u], rounded once where it is BF16; rows beyond U are not written.
void EmbeddingBackwardByRow(const EmbeddingShape& shape, const __nv_bfloat16* dy_TH,
                            const TokenGroups& groups, float* sum_UH, cudaStream_t stream);
void EmbeddingBackwardByRow(const EmbeddingShape& shape, const __nv_bfloat16* dy_TH,
                            const TokenGroups& groups, __nv_bfloat16* sum_UH, cudaStream_t stream);
void EmbeddingBackwardByRow(const EmbeddingShape& shape, const float* dy_TH,
                            const TokenGroups& groups, float* sum_UH, cudaStream_t stream);

// dweight_VH[v] accumulates: its tokens are added one by one to what is there.
void EmbeddingBackward(const EmbeddingShape& shape, const __nv_bfloat16* dy_TH,
                       const TokenGroups& groups, float* dweight_VH, cudaStream_t stream);
void EmbeddingBackward(const EmbeddingShape& shape, const float* dy_TH, const TokenGroups& groups,
                       float* dweight_VH, cudaStream_t stream);

}  // namespace oom
