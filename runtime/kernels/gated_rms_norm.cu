#include <algorithm>

#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/gated_rms_norm.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/packed.cuh"
#include "runtime/kernels/partial_rows.h"

namespace oom {
namespace internal {
namespace {

// Sixteen lanes a row, eight elements a lane.
constexpr int kWidth = 128;
constexpr int kCount = 8;
constexpr int kLanes = kWidth / kCount;
constexpr int kThreads = 256;
constexpr int kGroups = kThreads / kLanes;
// Rows that a group of lanes has under way at once.
constexpr int kRowsAtOnce = 4;
// Blocks of backward, and so rows of partial sums: four on each of 132 multiprocessors. A fixed
// number, since the order of summation follows from it.
constexpr int64_t kPartialRows = 528;

using Row = Packed<__nv_bfloat16, kCount>;

__device__ __forceinline__ float ReciprocalOfMean(const Row& x, float epsilon) {
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) square += x[i] * x[i];
  return rsqrtf(SumOverLanes<kLanes>(square) * (1.0f / kWidth) + epsilon);
}

__global__ void __launch_bounds__(kThreads)
    GatedRmsNormForwardKernel(GatedRmsNormInput input, __nv_bfloat16* y_RV) {
  const int column = threadIdx.x % kLanes * kCount;
  const int64_t first = int64_t{blockIdx.x} * kGroups * kRowsAtOnce + threadIdx.x / kLanes;
  const Packed<float, kCount> weight = Load<true, kCount>(input.weight_V + column, 1);
  Row x[kRowsAtOnce], gate[kRowsAtOnce];
#pragma unroll
  for (int k = 0; k < kRowsAtOnce; ++k) {
    const int64_t row = first + k * kGroups, exists = row < input.rows ? 1 : 0;
    x[k] = Load<true, kCount>(input.x_RV + row * kWidth + column, exists);
    gate[k] = Load<true, kCount>(input.gate_RV + row * kWidth + column, exists);
  }
#pragma unroll
  for (int k = 0; k < kRowsAtOnce; ++k) {
    const int64_t row = first + k * kGroups, exists = row < input.rows ? 1 : 0;
    const float r = ReciprocalOfMean(x[k], input.epsilon);
    float y[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      y[i] = x[k][i] * r * weight[i] * LogisticOf<__nv_bfloat16>(gate[k][i]).silu;
    }
    Store<true>(y_RV + row * kWidth + column, Pack<__nv_bfloat16>(y), exists);
  }
}

__global__ void __launch_bounds__(kThreads, 3)
    GatedRmsNormBackwardKernel(GatedRmsNormInput input, const __nv_bfloat16* dy_RV,
                               GatedRmsNormKernelGradients gradients, float* partials) {
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int column = lane * kCount;
  const Packed<float, kCount> weight = Load<true, kCount>(input.weight_V + column, 1);
  float dweight[kCount] = {};
  struct Rows {
    Row x, gate, dy;
  };
  const auto load = [&](int64_t row) {
    const int64_t place = row * kWidth + column, exists = row < input.rows ? 1 : 0;
    return Rows{Load<true, kCount>(input.x_RV + place, exists),
                Load<true, kCount>(input.gate_RV + place, exists),
                Load<true, kCount>(dy_RV + place, exists)};
  };
  const int64_t step = int64_t{gridDim.x} * kGroups;
  int64_t row = int64_t{blockIdx.x} * kGroups + group;
  Rows next = load(row);
  for (; row - group < input.rows; row += step) {
    const Rows now = next;
    next = load(row + step);
    const float r = ReciprocalOfMean(now.x, input.epsilon);
    float e[kCount], dgate[kCount];
    float along = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float z = now.gate[i], dy = now.dy[i], normalized = now.x[i] * r;
      const Logistic logistic = LogisticOf<__nv_bfloat16>(z);
      const float scaled = dy * normalized;
      e[i] = dy * weight[i] * logistic.silu;
      along += normalized * e[i];
      dgate[i] = scaled * weight[i] * logistic.value * (1.0f + z - logistic.silu);
      dweight[i] += scaled * logistic.silu;
    }
    const float mean = SumOverLanes<kLanes>(along) * (1.0f / kWidth);
    if (row >= input.rows) continue;
    const int64_t place = row * kWidth + column;
    Store<true>(gradients.gate_RV + place, Pack<__nv_bfloat16>(dgate), 1);
#pragma unroll
    for (int i = 0; i < kCount; ++i) e[i] = r * (e[i] - now.x[i] * r * mean);
    Store<true>(gradients.x_RV + place, Pack<float>(e), 1);
  }
  if (gradients.weight_V == nullptr) return;
  __shared__ float by_group[kGroups][kWidth];
#pragma unroll
  for (int i = 0; i < kCount; ++i) by_group[group][column + i] = dweight[i];
  __syncthreads();
  if (threadIdx.x >= kWidth) return;
  float sum = 0.0f;
  for (int other = 0; other < kGroups; ++other) sum += by_group[other][threadIdx.x];
  partials[int64_t{blockIdx.x} * kWidth + threadIdx.x] = sum;
}

}  // namespace
}  // namespace internal

void GatedRmsNormForward(const GatedRmsNormInput& input, __nv_bfloat16* y_RV, cudaStream_t stream) {
  using internal::kGroups;
  using internal::kRowsAtOnce;
  if (input.rows == 0) return;
  const auto blocks = static_cast<unsigned>(internal::DivideUp(input.rows, kGroups * kRowsAtOnce));
  internal::GatedRmsNormForwardKernel<<<blocks, internal::kThreads, 0, stream>>>(input, y_RV);
  CheckLaunch("GatedRmsNormForward");
}

int64_t GatedRmsNormBackwardScratchBytes() {
  return internal::kPartialRows * internal::kWidth * static_cast<int64_t>(sizeof(float));
}

void GatedRmsNormBackward(const GatedRmsNormInput& input, const __nv_bfloat16* dy_RV,
                          const GatedRmsNormKernelGradients& gradients, void* scratch,
                          cudaStream_t stream) {
  OOM_CHECK(gradients.weight_V == nullptr || scratch != nullptr);
  if (input.rows == 0) return;
  const int64_t blocks =
      std::min(internal::kPartialRows, internal::DivideUp(input.rows, internal::kGroups));
  float* const partials = static_cast<float*>(scratch);
  internal::
      GatedRmsNormBackwardKernel<<<static_cast<unsigned>(blocks), internal::kThreads, 0, stream>>>(
          input, dy_RV, gradients, partials);
  CheckLaunch("GatedRmsNormBackward");
  if (gradients.weight_V == nullptr) return;
  AddPartialRows(partials, blocks, internal::kWidth, gradients.weight_V, stream);
}

}  // namespace oom
