#include <algorithm>

#include "runtime/kernels/delta_gates.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/partial_rows.h"

namespace oom {
namespace internal {
namespace {

// A warp's lanes are heads; a block's warps take tokens in turn.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks along tokens, and so rows of partial sums. A fixed number, since the order of summation
// follows from it.
constexpr int64_t kPartialRows = 264;
constexpr float kSoftplusThreshold = 20.0f;  // Above it softplus is linear.

__device__ __forceinline__ float SoftPlus(float x) {
  return x > kSoftplusThreshold ? x : log1pf(expf(x));
}

__device__ __forceinline__ float LogisticFunction(float x) { return 1.0f / (1.0f + expf(-x)); }

__global__ void __launch_bounds__(kThreads)
    DeltaGatesForwardKernel(DeltaGateKernelInput input, float* beta_TN, float* log_decay_TN) {
  const int head = static_cast<int>(blockIdx.y) * 32 + threadIdx.x % 32;
  if (head >= input.value_heads) return;
  const float rate = -expf(input.a_log_N[head]), bias = input.dt_bias_N[head];
  const int64_t step = int64_t{gridDim.x} * kWarps;
#pragma unroll 4
  for (int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; token < input.tokens;
       token += step) {
    const int64_t place = token * input.value_heads + head;
    beta_TN[place] = LogisticFunction(__bfloat162float(input.b_TN[place]));
    log_decay_TN[place] = rate * SoftPlus(__bfloat162float(input.a_TN[place]) + bias);
  }
}

__global__ void __launch_bounds__(kThreads)
    DeltaGatesBackwardKernel(DeltaGateKernelInput input, DeltaGateKernelGradients gradients,
                             float* partials) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = static_cast<int>(blockIdx.y) * 32 + lane;
  float sums[2] = {};  // Of A_log and dt_bias.
  if (head < input.value_heads) {
    const float rate = -expf(input.a_log_N[head]), bias = input.dt_bias_N[head];
    const int64_t step = int64_t{gridDim.x} * kWarps;
#pragma unroll 2
    for (int64_t token = int64_t{blockIdx.x} * kWarps + warp; token < input.tokens; token += step) {
      const int64_t place = token * input.value_heads + head;
      const float beta = LogisticFunction(__bfloat162float(input.b_TN[place]));
      const float x = __bfloat162float(input.a_TN[place]) + bias;
      const float dlog_decay = gradients.log_decay_TN[place];
      const float slope = x > kSoftplusThreshold ? 1.0f : LogisticFunction(x);
      const float da = dlog_decay * rate * slope;
      gradients.b_TN[place] =
          __float2bfloat16_rn(gradients.beta_TN[place] * (beta * (1.0f - beta)));
      gradients.a_TN[place] = __float2bfloat16_rn(da);
      sums[0] += dlog_decay * rate * SoftPlus(x);
      sums[1] += da;
    }
  }
  __shared__ float by_warp[2][kWarps][32];
  by_warp[0][warp][lane] = sums[0];
  by_warp[1][warp][lane] = sums[1];
  __syncthreads();
  if (warp >= 2 || head >= input.value_heads) return;
  float sum = 0.0f;
  for (int other = 0; other < kWarps; ++other) sum += by_warp[warp][other][lane];
  partials[(warp * int64_t{gridDim.x} + blockIdx.x) * input.value_heads + head] = sum;
}

dim3 Grid(const DeltaGateKernelInput& input) {
  const int64_t blocks = std::min(kPartialRows, (input.tokens + kWarps - 1) / kWarps);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>((input.value_heads + 31) / 32));
}

}  // namespace
}  // namespace internal

void DeltaGatesForward(const DeltaGateKernelInput& input, float* beta_TN, float* log_decay_TN,
                       cudaStream_t stream) {
  if (input.tokens == 0) return;
  internal::DeltaGatesForwardKernel<<<internal::Grid(input), internal::kThreads, 0, stream>>>(
      input, beta_TN, log_decay_TN);
  CheckLaunch("DeltaGatesForward");
}

int64_t DeltaGatesBackwardScratchBytes(const DeltaGateKernelInput& input) {
  return 2 * internal::kPartialRows * input.value_heads * static_cast<int64_t>(sizeof(float));
}

void DeltaGatesBackward(const DeltaGateKernelInput& input,
                        const DeltaGateKernelGradients& gradients, void* scratch,
                        cudaStream_t stream) {
  OOM_CHECK(scratch != nullptr);
  if (input.tokens == 0) return;
  const dim3 grid = internal::Grid(input);
  float* const partials = static_cast<float*>(scratch);
  internal::DeltaGatesBackwardKernel<<<grid, internal::kThreads, 0, stream>>>(input, gradients,
                                                                              partials);
  CheckLaunch("DeltaGatesBackward");
  const int64_t rows = grid.x;
  AddPartialRows(partials, rows, input.value_heads, gradients.a_log_N, stream);
  AddPartialRows(partials + rows * input.value_heads, rows, input.value_heads, gradients.dt_bias_N,
                 stream);
}

}  // namespace oom
