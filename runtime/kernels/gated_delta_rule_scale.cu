// The greatest gradient of each key head's value heads, then the scaled FP16 copy of the output's
// gradient. A maximum does not depend on the order in which it is taken.

#include "runtime/kernels/gated_delta_rule_scale.cuh"
#include "runtime/kernels/gated_delta_rule_stages.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/tensor_fragments.cuh"

namespace oom::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksOfHead = 64;

__device__ __forceinline__ uint32_t Magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// Of `rows` rows of 128, `stride` apart: those of block y's warps.
__device__ uint32_t GreatestOfRows(const float* first, int64_t rows, int64_t stride) {
  const int lane = threadIdx.x % 32;
  uint32_t greatest = 0;
  const int64_t step = int64_t{gridDim.y} * kWarps;
#pragma unroll 4
  for (int64_t row = int64_t{blockIdx.y} * kWarps + threadIdx.x / 32; row < rows; row += step) {
    const float4 x = reinterpret_cast<const float4*>(first + row * stride)[lane];
    greatest = max(greatest,
                   max(max(Magnitude(x.x), Magnitude(x.y)), max(Magnitude(x.z), Magnitude(x.w))));
  }
  return greatest;
}

__global__ void __launch_bounds__(kThreads)
    MagnitudeKernel(GatedDeltaRuleShape shape, GatedDeltaRuleOutputGradient doutput,
                    uint32_t* magnitude_G) {
  const int head = blockIdx.x;
  uint32_t greatest = GreatestOfRows(doutput.output_TNV + int64_t{head} * kDeltaHeadSize,
                                     shape.tokens, int64_t{shape.value_heads} * kDeltaHeadSize);
  if (doutput.state_DNKV != nullptr) {
    for (int64_t document = 0; document < shape.documents; ++document) {
      greatest =
          max(greatest, GreatestOfRows(doutput.state_DNKV +
                                           (document * shape.value_heads + head) * kStateElements,
                                       kDeltaHeadSize, kDeltaHeadSize));
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, offset));
  }
  if (threadIdx.x % 32 == 0) {
    atomicMax(magnitude_G + head / (shape.value_heads / shape.key_heads), greatest);
  }
}

// Eight elements a thread; a head's 128 are sixteen threads'.
__global__ void __launch_bounds__(kThreads)
    ScaleKernel(const float* doutput, int64_t vectors, GatedDeltaRuleShape shape,
                const uint32_t* magnitude_G, __half* scaled) {
  const int64_t vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  const int64_t head = vector / (kDeltaHeadSize / 8) % shape.value_heads;
  const float scale = GradientScale(magnitude_G[head / (shape.value_heads / shape.key_heads)]);
  const float4 a = reinterpret_cast<const float4*>(doutput)[2 * vector];
  const float4 b = reinterpret_cast<const float4*>(doutput)[2 * vector + 1];
  reinterpret_cast<uint4*>(scaled)[vector] =
      make_uint4(PackHalves(scale * a.x, scale * a.y), PackHalves(scale * a.z, scale * a.w),
                 PackHalves(scale * b.x, scale * b.y), PackHalves(scale * b.z, scale * b.w));
}

}  // namespace

void ScaleDeltaGradients(const DeltaStage& stage, const GatedDeltaRuleOutputGradient& doutput,
                         cudaStream_t stream) {
  const GatedDeltaRuleShape& shape = stage.shape;
  static_cast<void>(
      cudaMemsetAsync(stage.scratch.magnitude, 0, shape.key_heads * sizeof(uint32_t), stream));
  MagnitudeKernel<<<dim3(static_cast<unsigned>(shape.value_heads), kBlocksOfHead), kThreads, 0,
                    stream>>>(shape, doutput, stage.scratch.magnitude);
  const int64_t vectors = shape.tokens * shape.value_heads * (kDeltaHeadSize / 8);
  const auto blocks = static_cast<unsigned>((vectors + kThreads - 1) / kThreads);
  ScaleKernel<<<blocks, kThreads, 0, stream>>>(doutput.output_TNV, vectors, shape,
                                               stage.scratch.magnitude, stage.scratch.doutput);
  CheckLaunch("ScaleDeltaGradients");
}

}  // namespace oom::internal
