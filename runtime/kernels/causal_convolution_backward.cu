#include <algorithm>

#include "runtime/kernels/causal_convolution.cuh"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/partial_rows.h"

namespace oom {
namespace internal {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStripTokens = 64;
constexpr int kAhead = 4;
// Rows of partial sums of dw. A fixed number, since the order of summation follows from it.
constexpr int64_t kPartialRows = 128;

int64_t PartialRows(int64_t tokens) {
  return std::min(kPartialRows, DivideUp(tokens, kWarps * kStripTokens));
}

struct OutputGradientOfHead {
  __device__ OutputGradientOfHead(const ConvolutionHead& head,
                                  const CausalConvolutionOutputGradient& doutput)
      : normed(head.part != 2),
        width(head.width),
        values((head.part == 0   ? doutput.query
                : head.part == 1 ? doutput.key
                                 : doutput.value) +
               head.first + threadIdx.x % 32 * kLaneChannels) {}

  __device__ Packed<float, kLaneChannels> Row(int64_t token, bool exists) const {
    return Load<true, kLaneChannels>(values + token * width, exists ? 1 : 0);
  }

  bool normed;
  int64_t width;
  const float* values;
};

// dc of a token; all lanes of the warp call it.
__device__ __forceinline__ void SumGradient(const ConvolutionLane& lane,
                                            const ConvolutionWindow& window,
                                            const ConvolutionRow& row,
                                            const Packed<float, kLaneChannels>& dy, bool normed,
                                            float (&dc)[kLaneChannels]) {
  Logistic logistic[kLaneChannels];
  float c[kLaneChannels];
  float square = 0.0f, along = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    c[i] = window.Sum(lane, row, i);
    logistic[i] = LogisticOf<__nv_bfloat16>(c[i]);
    square += logistic[i].silu * logistic[i].silu;
    along += logistic[i].silu * dy[i];
  }
  float r = 1.0f;
  if (normed) {
    r = rsqrtf(SumOverLanes<32>(square) + kLengthEpsilon);
    along = SumOverLanes<32>(along) * r * r;
  } else {
    along = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const float du = r * (dy[i] - logistic[i].silu * along);
    dc[i] = du * logistic[i].value * (1.0f + c[i] - logistic[i].silu);
  }
}

// The last tokens' dc, oldest first.
struct SumGradients {
  float rows[kTaps][kLaneChannels] = {};

  __device__ void Push(const float (&dc)[kLaneChannels]) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
#pragma unroll
      for (int j = 0; j < kContextRows; ++j) rows[j][i] = rows[j + 1][i];
      rows[kContextRows][i] = dc[i];
    }
  }
};

// dx of the oldest of the four tokens.
__device__ __forceinline__ void StoreInputGradient(const ConvolutionLane& lane,
                                                   const SumGradients& sums,
                                                   const DocumentCursor& at, int64_t token,
                                                   const float* dcontext_DPC,
                                                   __nv_bfloat16* dx_TC) {
  float dx[kLaneChannels];
  const int64_t left = at.end() - token;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    dx[i] = lane.weight[3][i] * sums.rows[0][i];
    if (left > 1) dx[i] += lane.weight[2][i] * sums.rows[1][i];
    if (left > 2) dx[i] += lane.weight[1][i] * sums.rows[2][i];
    if (left > 3) dx[i] += lane.weight[0][i] * sums.rows[3][i];
  }
  if (left <= kContextRows && dcontext_DPC != nullptr) {
    const Packed<float, kLaneChannels> later = Load<true, kLaneChannels>(
        dcontext_DPC + (at.document() * kContextRows + kContextRows - left) * lane.channels +
            lane.channel,
        1);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) dx[i] += later[i];
  }
  Store<true>(dx_TC + token * lane.channels + lane.channel, Pack<__nv_bfloat16>(dx), 1);
}

__global__ void __launch_bounds__(kThreads, 2)
    ConvolutionBackwardKernel(CausalConvolutionShape shape, CausalConvolutionKernelInput input,
                              CausalConvolutionOutputGradient doutput, __nv_bfloat16* dx_TC,
                              float* partials) {
  const ConvolutionHead head(shape, blockIdx.x);
  const OutputGradientOfHead gradient(head, doutput);
  const int64_t lane_channel = threadIdx.x % 32 * kLaneChannels;
  const ConvolutionLane lane(shape, input, blockIdx.x * kHeadChannels + lane_channel);
  float dweight[kTaps][kLaneChannels] = {};
  const int64_t step_tokens = int64_t{gridDim.y} * kWarps * kStripTokens;
  for (int64_t first = (int64_t{blockIdx.y} * kWarps + threadIdx.x / 32) * kStripTokens;
       first < shape.tokens; first += step_tokens) {
    const int64_t end = min(first + kStripTokens, shape.tokens);
    // Tokens behind the strip whose sums its last ones are in.
    const int64_t seen_end = min(end + kContextRows, shape.tokens);
    DocumentCursor at(input.cu_seqlens, shape.documents, first);
    DocumentCursor written = at;
    ConvolutionWindow window;
    window.Fill(lane, at, first);
    SumGradients sums;
    ConvolutionRow next[kAhead];
    Packed<float, kLaneChannels> next_dy[kAhead];
    const auto load = [&](int64_t token, int i) {
      next[i] = lane.Row(token, token < seen_end);
      next_dy[i] = gradient.Row(token, token < seen_end);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(first + i, i);
    for (int64_t base = first; base < end + kContextRows; base += kAhead) {
      ConvolutionRow rows[kAhead];
      Packed<float, kLaneChannels> dy[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        rows[i] = next[i];
        dy[i] = next_dy[i];
        load(base + kAhead + i, i);
      }
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        const int64_t token = base + step;
        if (token >= end + kContextRows) break;
        float dc[kLaneChannels] = {};
        if (token < seen_end) {
          at.MoveTo(token);
          if (token == at.start()) window.Fill(lane, at, token);
          SumGradient(lane, window, rows[step], dy[step], gradient.normed, dc);
          if (token < end) {
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) {
#pragma unroll
              for (int j = 0; j < kContextRows; ++j) dweight[j][i] += dc[i] * window.rows[j][i];
              dweight[kContextRows][i] += dc[i] * rows[step][i];
            }
          }
          window.Push(rows[step]);
        }
        sums.Push(dc);
        const int64_t oldest = token - kContextRows;
        if (oldest < first) continue;
        written.MoveTo(oldest);
        StoreInputGradient(lane, sums, written, oldest, doutput.context_DPC, dx_TC);
      }
    }
  }

  __shared__ float by_warp[kWarps][kHeadChannels * kTaps];
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      by_warp[threadIdx.x / 32][(lane_channel + i) * kTaps + j] = dweight[j][i];
    }
  }
  __syncthreads();
  float* const partial =
      partials + (blockIdx.y * shape.channels() + int64_t{blockIdx.x} * kHeadChannels) * kTaps;
  for (int element = threadIdx.x; element < kHeadChannels * kTaps; element += kThreads) {
    float sum = 0.0f;
    for (int warp = 0; warp < kWarps; ++warp) sum += by_warp[warp][element];
    partial[element] = sum;
  }
}

// Of the rows before each document's first token; a warp a document and head.
__global__ void __launch_bounds__(32)
    ContextGradientKernel(CausalConvolutionShape shape, CausalConvolutionKernelInput input,
                          CausalConvolutionOutputGradient doutput, float* dcontext_DPC) {
  const OutputGradientOfHead gradient(ConvolutionHead(shape, blockIdx.y), doutput);
  const ConvolutionLane lane(shape, input,
                             blockIdx.y * kHeadChannels + threadIdx.x * kLaneChannels);
  const int64_t document = blockIdx.x;
  const int64_t start = input.cu_seqlens[document];
  const int64_t length = input.cu_seqlens[document + 1] - start;
  float sums[kContextRows][kLaneChannels] = {};
  if (length > 0) {
    const DocumentCursor at(input.cu_seqlens, shape.documents, start);
    ConvolutionWindow window;
    window.Fill(lane, at, start);
#pragma unroll
    for (int row = 0; row < kContextRows; ++row) {
      if (row >= length) continue;
      const ConvolutionRow x = lane.Row(start + row, true);
      SumGradient(lane, window, x, gradient.Row(start + row, true), gradient.normed, sums[row]);
      window.Push(x);
    }
  }
#pragma unroll
  for (int row = 0; row < kContextRows; ++row) {
    float dcontext[kLaneChannels] = {};
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
#pragma unroll
      for (int j = 0; j <= row; ++j) dcontext[i] += lane.weight[j][i] * sums[row - j][i];
      // A document shorter than its context hands rows on.
      if (row >= length && doutput.context_DPC != nullptr) {
        dcontext[i] +=
            doutput.context_DPC[(document * kContextRows + row - length) * lane.channels +
                                lane.channel + i];
      }
    }
    Store<true>(dcontext_DPC + (document * kContextRows + row) * lane.channels + lane.channel,
                Pack<float>(dcontext), 1);
  }
}

}  // namespace
}  // namespace internal

int64_t CausalConvolutionBackwardScratchBytes(const CausalConvolutionShape& shape) {
  return internal::PartialRows(shape.tokens) * shape.channels() * internal::kTaps *
         static_cast<int64_t>(sizeof(float));
}

void CausalConvolutionBackward(const CausalConvolutionShape& shape,
                               const CausalConvolutionKernelInput& input,
                               const CausalConvolutionOutputGradient& doutput,
                               const CausalConvolutionKernelGradients& gradients, void* scratch,
                               cudaStream_t stream) {
  OOM_CHECK(shape.tokens > 0 && shape.documents > 0);
  OOM_CHECK(shape.key_width > 0 && shape.key_width % internal::kHeadChannels == 0);
  OOM_CHECK(shape.value_width > 0 && shape.value_width % internal::kHeadChannels == 0);
  OOM_CHECK(scratch != nullptr);
  const auto heads = static_cast<unsigned>(shape.channels() / internal::kHeadChannels);
  const int64_t rows = internal::PartialRows(shape.tokens);
  float* const partials = static_cast<float*>(scratch);
  internal::ConvolutionBackwardKernel<<<dim3(heads, static_cast<unsigned>(rows)),
                                        internal::kThreads, 0, stream>>>(shape, input, doutput,
                                                                         gradients.x_TC, partials);
  if (gradients.context_DPC != nullptr) {
    internal::ContextGradientKernel<<<dim3(static_cast<unsigned>(shape.documents), heads), 32, 0,
                                      stream>>>(shape, input, doutput, gradients.context_DPC);
  }
  CheckLaunch("CausalConvolutionBackward");
  AddPartialRows(partials, rows, shape.channels() * internal::kTaps, gradients.weight_CJ, stream);
}

}  // namespace oom
