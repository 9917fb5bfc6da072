#include "runtime/kernels/causal_convolution.cuh"
#include "runtime/kernels/launch.h"

namespace oom {
namespace internal {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStripTokens = 64;
constexpr int kAhead = 8;  // Rows under way while as many are worked on.

__device__ __forceinline__ void StoreHalves(__half* to, const float (&x)[kLaneChannels]) {
  const __half2 pairs[2] = {__floats2half2_rn(x[0], x[1]), __floats2half2_rn(x[2], x[3])};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
}

// A block's warps take strips one after another of one head.
__global__ void __launch_bounds__(kThreads)
    ConvolutionForwardKernel(CausalConvolutionShape shape, CausalConvolutionKernelInput input,
                             CausalConvolutionKernelOutput output) {
  const ConvolutionHead head(shape, blockIdx.x);
  const int64_t lane_channel = threadIdx.x % 32 * kLaneChannels;
  const int64_t first = (int64_t{blockIdx.y} * kWarps + threadIdx.x / 32) * kStripTokens;
  if (first >= shape.tokens) return;
  const int64_t end = min(first + kStripTokens, shape.tokens);
  const ConvolutionLane lane(shape, input, blockIdx.x * kHeadChannels + lane_channel);
  DocumentCursor at(input.cu_seqlens, shape.documents, first);
  ConvolutionWindow window;
  window.Fill(lane, at, first);
  ConvolutionRow next[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) next[i] = lane.Row(first + i, first + i < end);
  for (int64_t base = first; base < end; base += kAhead) {
    ConvolutionRow rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) rows[i] = next[i];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      next[i] = lane.Row(base + kAhead + i, base + kAhead + i < end);
    }
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const int64_t token = base + step;
      if (token >= end) break;
      at.MoveTo(token);
      if (token == at.start()) window.Fill(lane, at, token);
      float u[kLaneChannels];
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        u[i] = LogisticOf<__nv_bfloat16>(window.Sum(lane, rows[step], i)).silu;
        square += u[i] * u[i];
      }
      window.Push(rows[step]);
      const int64_t place = token * head.width + head.first + lane_channel;
      if (head.part == 2) {
        Store<true>(output.value + place, Pack<__nv_bfloat16>(u), 1);
      } else {
        const float r = rsqrtf(SumOverLanes<32>(square) + kLengthEpsilon);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) u[i] *= r;
        StoreHalves((head.part == 0 ? output.query : output.key) + place, u);
      }
    }
  }
}

// Of each document the last rows, or what is left of its context.
__global__ void ContextKernel(CausalConvolutionShape shape, CausalConvolutionKernelInput input,
                              __nv_bfloat16* context_DPC) {
  const int64_t channels = shape.channels();
  const int64_t channel = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kLaneChannels;
  if (channel >= channels) return;
  const int64_t document = blockIdx.x / kContextRows;
  const int64_t start = input.cu_seqlens[document];
  const int64_t row = input.cu_seqlens[document + 1] - start - kContextRows +
                      static_cast<int64_t>(blockIdx.x % kContextRows);
  Packed<__nv_bfloat16, kLaneChannels> values = {};
  if (row >= 0) {
    values = Load<true, kLaneChannels>(input.x_TC + (start + row) * channels + channel, 1);
  } else if (input.context_DPC != nullptr) {
    values = Load<true, kLaneChannels>(
        input.context_DPC + (document * kContextRows + kContextRows + row) * channels + channel, 1);
  }
  Store<true>(context_DPC + blockIdx.x * channels + channel, values, 1);
}

}  // namespace
}  // namespace internal

void CausalConvolutionForward(const CausalConvolutionShape& shape,
                              const CausalConvolutionKernelInput& input,
                              const CausalConvolutionKernelOutput& output, cudaStream_t stream) {
  using internal::DivideUp;
  OOM_CHECK(shape.tokens > 0 && shape.documents > 0);
  OOM_CHECK(shape.key_width > 0 && shape.key_width % internal::kHeadChannels == 0);
  OOM_CHECK(shape.value_width > 0 && shape.value_width % internal::kHeadChannels == 0);
  const auto heads = static_cast<unsigned>(shape.channels() / internal::kHeadChannels);
  const auto strips =
      static_cast<unsigned>(DivideUp(shape.tokens, internal::kWarps * internal::kStripTokens));
  internal::ConvolutionForwardKernel<<<dim3(heads, strips), internal::kThreads, 0, stream>>>(
      shape, input, output);
  if (output.context_DPC != nullptr) {
    const auto rows = static_cast<unsigned>(shape.documents * internal::kContextRows);
    const auto parts = static_cast<unsigned>(
        DivideUp(shape.channels(), internal::kThreads * internal::kLaneChannels));
    internal::ContextKernel<<<dim3(rows, parts), internal::kThreads, 0, stream>>>(
        shape, input, output.context_DPC);
  }
  CheckLaunch("CausalConvolutionForward");
}

}  // namespace oom
