// A block of threads a row, which it holds in registers: so the results may overwrite the scores.

#include <cmath>

#include "runtime/base/check.h"
#include "runtime/kernels/attention_scores.h"
#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/packed.cuh"

namespace oom {
namespace {

using internal::ApproximateExp2;
using internal::DivideUp;
using internal::kLog2E;
using internal::Load;
using internal::Pack;
using internal::Packed;
using internal::Store;
using internal::SumOverLanes;
using internal::WholeVectors;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 4;  // Neighbouring columns of a thread.
constexpr int kVectors = static_cast<int>(kScoreColumnsMax) / (kThreads * kVector);

// A row of a block, and what it sees of the columns: [first, end).
struct Row {
  int64_t token;
  int64_t head;
  int first;
  int end;

  __device__ Row(const ScoreBlock& block, int group, int row) {
    token = block.first_token + row / block.heads_of_group;
    head = group * block.heads_of_group + row % block.heads_of_group;
    int64_t before = block.positions_T[token];
    if (block.window > 0) before = min(before, block.window - 1);
    first = static_cast<int>(max(token - before - block.first_key, int64_t{0}));
    end = static_cast<int>(min(token + 1 - block.first_key, block.columns));
  }
  __device__ bool Sees(int column) const { return column >= first && column < end; }
  __device__ int64_t Index(const ScoreBlock& block) const {
    return token * block.group_count * block.heads_of_group + head;
  }
};

__device__ __forceinline__ int ColumnOf(int vector) {
  return (vector * kThreads + static_cast<int>(threadIdx.x)) * kVector;
}

// Of all the block's threads; the barrier inside also ends all reads before it.
template <class Combine>
__device__ float OverThreads(float x, float* buffer, const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = combine(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
  }
  if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
  __syncthreads();
  x = buffer[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) x = combine(x, buffer[warp]);
  return x;
}

__device__ __forceinline__ void StoreRounded(void* row, int column,
                                             const Packed<__nv_bfloat16, kVector>& values) {
  Store<true>(static_cast<__nv_bfloat16*>(row) + column, values, kVector);
}

__global__ void __launch_bounds__(kThreads)
    SoftmaxKernel(ScoreBlock block, bool first_block, float* scores_GRC, SoftmaxState state) {
  __shared__ float maxima[kWarps], sums[kWarps], weights[kWarps];
  const int group = blockIdx.y;
  const Row row(block, group, blockIdx.x);
  const int64_t index = group * block.rows + blockIdx.x;
  float* const scores = scores_GRC + index * block.row_stride;
  const float unit = block.scale * kLog2E;
  const float before = first_block ? -INFINITY : state.maximum_GR[index];

  float values[kVectors][kVector];
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = ColumnOf(i);
    // No use reading what the row doesn't see, as half of the scores near the diagonal.
    float4 raw = {};
    if (column < row.end && column + kVector > row.first) {
      raw = *reinterpret_cast<const float4*>(scores + column);
    }
    const float all[kVector] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      values[i][k] = row.Sees(column + k) ? all[k] * unit : -INFINITY;
      maximum = fmaxf(maximum, values[i][k]);
    }
  }
  maximum = OverThreads(maximum, maxima, [](float a, float b) { return fmaxf(a, b); });
  maximum = fmaxf(maximum, before);
  // A row that has seen nothing yet has no greatest score; any finite one gives zeros.
  const float base = maximum == -INFINITY ? 0.0f : maximum;

  float sum = 0.0f, weight = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = ColumnOf(i);
#pragma unroll
    for (int k = 0; k < kVector; ++k) values[i][k] = ApproximateExp2(values[i][k] - base);
    const auto rounded = Pack<__nv_bfloat16>(values[i]);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      sum += values[i][k];
      weight += rounded[k];
    }
    if (column < block.columns) StoreRounded(scores, column, rounded);
  }
  const auto add = [](float a, float b) { return a + b; };
  sum = OverThreads(sum, sums, add);
  weight = OverThreads(weight, weights, add);

  const float rebase = first_block ? 0.0f : ApproximateExp2(before - base);
  if (threadIdx.x == 0) {
    state.maximum_GR[index] = maximum;
    state.sum_GR[index] = first_block ? sum : state.sum_GR[index] * rebase + sum;
    state.weight_GR[index] = first_block ? weight : state.weight_GR[index] * rebase + weight;
  }
  if (first_block || rebase == 1.0f) return;
  for (int64_t i = threadIdx.x * kVector; i < state.head_size; i += kThreads * kVector) {
    float4* const at = reinterpret_cast<float4*>(state.output_GRd + index * state.head_size + i);
    float4 x = *at;
    x.x *= rebase;
    x.y *= rebase;
    x.z *= rebase;
    x.w *= rebase;
    *at = x;
  }
}

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    FinishKernel(ScoreBlock block, SoftmaxState state, __nv_bfloat16* output_TNd,
                 float* logsumexp_TN) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= block.group_count * block.rows) return;
  const Row row(block, static_cast<int>(index / block.rows), static_cast<int>(index % block.rows));
  const float inverse = 1.0f / state.weight_GR[index];
  const int lane = threadIdx.x % 32;
  const float* const from = state.output_GRd + index * state.head_size;
  __nv_bfloat16* const to = output_TNd + row.Index(block) * state.head_size;
  for (int64_t i = lane * kVector; i < state.head_size; i += 32 * kVector) {
    const float4 x = *reinterpret_cast<const float4*>(from + i);
    const float output[kVector] = {x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse};
    StoreRounded(to, static_cast<int>(i), Pack<__nv_bfloat16>(output));
  }
  if (lane == 0) {
    logsumexp_TN[row.Index(block)] =
        (state.maximum_GR[index] + log2f(state.sum_GR[index])) * (1.0f / kLog2E);
  }
}

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    DeltaKernel(int64_t rows, int64_t head_size, const __nv_bfloat16* doutput_Rd,
                const __nv_bfloat16* output_Rd, float* delta_R) {
  constexpr int kCount = internal::kPackedCount<__nv_bfloat16>;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int64_t i = lane * kCount; i < head_size; i += 32 * kCount) {
    const auto doutput = Load<true, kCount>(doutput_Rd + row * head_size + i, kCount);
    const auto output = Load<true, kCount>(output_Rd + row * head_size + i, kCount);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum = fmaf(doutput[k], output[k], sum);
  }
  sum = SumOverLanes<32>(sum);
  if (lane == 0) delta_R[row] = sum;
}

__global__ void __launch_bounds__(kThreads)
    GradientKernel(ScoreBlock block, ScoreGradientArguments a) {
  const int group = blockIdx.y;
  const Row row(block, group, blockIdx.x);
  const int64_t offset = (group * block.rows + blockIdx.x) * block.row_stride;
  float* const scores = a.scores_GRC + offset;
  const float* const dprobabilities = a.dprobabilities_GRC + offset;
  const float unit = block.scale * kLog2E;
  const float logsumexp = a.logsumexp_TN[row.Index(block)] * kLog2E;
  const float delta = a.delta_TN[row.Index(block)];

  float probability[kVectors][kVector], gradient[kVectors][kVector];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = ColumnOf(i);
    float4 score = {}, dprobability = {};
    if (column < row.end && column + kVector > row.first) {
      score = *reinterpret_cast<const float4*>(scores + column);
      dprobability = *reinterpret_cast<const float4*>(dprobabilities + column);
    }
    const float s[kVector] = {score.x, score.y, score.z, score.w};
    const float d[kVector] = {dprobability.x, dprobability.y, dprobability.z, dprobability.w};
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const bool sees = row.Sees(column + k);
      probability[i][k] = sees ? ApproximateExp2(fmaf(s[k], unit, -logsumexp)) : 0.0f;
      gradient[i][k] = sees ? probability[i][k] * (d[k] - delta) * block.scale : 0.0f;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = ColumnOf(i);
    if (column >= block.columns) continue;
    StoreRounded(scores, column, Pack<__nv_bfloat16>(probability[i]));
    StoreRounded(reinterpret_cast<__nv_bfloat16*>(scores) + block.row_stride, column,
                 Pack<__nv_bfloat16>(gradient[i]));
  }
}

void CheckBlock(const ScoreBlock& block) {
  OOM_CHECK(block.group_count > 0 && block.group_count <= 65535 && block.heads_of_group > 0);
  OOM_CHECK(block.rows > 0 && block.rows % block.heads_of_group == 0 && block.rows <= INT32_MAX);
  OOM_CHECK(block.columns > 0 && block.columns <= kScoreColumnsMax);
  OOM_CHECK(block.row_stride >= block.columns && block.row_stride % 8 == 0);
  OOM_CHECK(block.window >= 0 && block.positions_T != nullptr);
}

dim3 OneBlockARow(const ScoreBlock& block) {
  return {static_cast<unsigned>(block.rows), static_cast<unsigned>(block.group_count)};
}

}  // namespace

void SoftmaxOfScores(const ScoreBlock& block, bool first, float* scores_GRC,
                     const SoftmaxState& state, cudaStream_t stream) {
  CheckBlock(block);
  OOM_CHECK(WholeVectors(block.row_stride * 4, scores_GRC) &&
            WholeVectors(state.head_size * 4, state.output_GRd));
  SoftmaxKernel<<<OneBlockARow(block), kThreads, 0, stream>>>(block, first, scores_GRC, state);
  CheckLaunch("SoftmaxOfScores");
}

void FinishSoftmax(const ScoreBlock& block, const SoftmaxState& state, __nv_bfloat16* output_TNd,
                   float* logsumexp_TN, cudaStream_t stream) {
  CheckBlock(block);
  OOM_CHECK(WholeVectors(state.head_size * 2, output_TNd) &&
            WholeVectors(state.head_size * 4, state.output_GRd));
  const auto blocks = static_cast<unsigned>(DivideUp(block.group_count * block.rows, kWarps));
  FinishKernel<<<blocks, kThreads, 0, stream>>>(block, state, output_TNd, logsumexp_TN);
  CheckLaunch("FinishSoftmax");
}

void AttentionDelta(int64_t rows, int64_t head_size, const __nv_bfloat16* doutput_Rd,
                    const __nv_bfloat16* output_Rd, float* delta_R, cudaStream_t stream) {
  if (rows == 0) return;
  OOM_CHECK(rows > 0 && WholeVectors(head_size * 2, doutput_Rd, output_Rd));
  const auto blocks = static_cast<unsigned>(DivideUp(rows, kWarps));
  DeltaKernel<<<blocks, kThreads, 0, stream>>>(rows, head_size, doutput_Rd, output_Rd, delta_R);
  CheckLaunch("AttentionDelta");
}

void ScoreGradients(const ScoreBlock& block, const ScoreGradientArguments& arguments,
                    cudaStream_t stream) {
  CheckBlock(block);
  OOM_CHECK(WholeVectors(block.row_stride * 4, arguments.scores_GRC,
                         arguments.dprobabilities_GRC));
  GradientKernel<<<OneBlockARow(block), kThreads, 0, stream>>>(block, arguments);
  CheckLaunch("ScoreGradients");
}

}  // namespace oom
