// What the two directions of the causal convolution share: a warp goes through a strip of tokens of
// one head, four channels a lane, with the rows before the current one in registers. Device code,
// internal to this folder.

#pragma once

#include "runtime/kernels/causal_convolution.h"
#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/packed.cuh"

namespace oom::internal {

inline constexpr int kTaps = 4;
inline constexpr int kContextRows = kTaps - 1;
inline constexpr int kHeadChannels = 128;
inline constexpr int kLaneChannels = kHeadChannels / 32;
inline constexpr float kLengthEpsilon = 1e-6f;

using ConvolutionRow = Packed<__nv_bfloat16, kLaneChannels>;

// The document of a token that moves on.
class DocumentCursor {
 public:
  // The last document that begins at or before `token`, which is within [0, T).
  __device__ DocumentCursor(const int64_t* cu_seqlens, int64_t documents, int64_t token)
      : cu_seqlens_(cu_seqlens) {
    int64_t low = 0, high = documents;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (cu_seqlens[middle] <= token ? low : high) = middle;
    }
    document_ = low;
    start_ = cu_seqlens[low];
    end_ = cu_seqlens[low + 1];
  }

  // REQUIRES: token < T, and not before the last one.
  __device__ void MoveTo(int64_t token) {
    while (token >= end_) {
      ++document_;
      start_ = end_;
      end_ = cu_seqlens_[document_ + 1];
    }
  }

  __device__ int64_t document() const { return document_; }
  __device__ int64_t start() const { return start_; }
  __device__ int64_t end() const { return end_; }

 private:
  const int64_t* cu_seqlens_;
  int64_t document_;
  int64_t start_;
  int64_t end_;
};

// The four channels that a lane works on, and its taps.
struct ConvolutionLane {
  __device__ ConvolutionLane(const CausalConvolutionShape& shape,
                             const CausalConvolutionKernelInput& input, int64_t first_channel)
      : input(input), channels(shape.channels()), channel(first_channel) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const Packed<__nv_bfloat16, kTaps> taps =
          Load<true, kTaps>(input.weight_CJ + (channel + i) * kTaps, kTaps);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) weight[j][i] = taps[j];
    }
  }

  __device__ ConvolutionRow Row(int64_t token, bool exists) const {
    return Load<true, kLaneChannels>(input.x_TC + token * channels + channel, exists ? 1 : 0);
  }

  // Row `row` of a document's tokens, or of its context where it is negative.
  __device__ ConvolutionRow RowOrContext(const DocumentCursor& at, int64_t row) const {
    if (row >= 0) return Row(at.start() + row, true);
    if (input.context_DPC == nullptr) return {};
    return Load<true, kLaneChannels>(
        input.context_DPC + (at.document() * kContextRows + kContextRows + row) * channels +
            channel,
        1);
  }

  CausalConvolutionKernelInput input;
  int64_t channels;
  int64_t channel;
  float weight[kTaps][kLaneChannels];
};

// The rows before the current one, widened.
struct ConvolutionWindow {
  float rows[kContextRows][kLaneChannels];

  // The rows before `token`.
  __device__ void Fill(const ConvolutionLane& lane, const DocumentCursor& at, int64_t token) {
#pragma unroll
    for (int j = 0; j < kContextRows; ++j) {
      const ConvolutionRow row = lane.RowOrContext(at, token - at.start() - kContextRows + j);
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) rows[j][i] = row[i];
    }
  }

  __device__ void Push(const ConvolutionRow& row) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      rows[0][i] = rows[1][i];
      rows[1][i] = rows[2][i];
      rows[2][i] = row[i];
    }
  }

  __device__ float Sum(const ConvolutionLane& lane, const ConvolutionRow& row, int i) const {
    return lane.weight[0][i] * rows[0][i] + lane.weight[1][i] * rows[1][i] +
           lane.weight[2][i] * rows[2][i] + lane.weight[3][i] * row[i];
  }
};

// Which part of the channels a head belongs to, and its place in it.
struct ConvolutionHead {
  __device__ ConvolutionHead(const CausalConvolutionShape& shape, int64_t head)
      : part(static_cast<int>(min(head * kHeadChannels / shape.key_width, int64_t{2}))),
        width(part == 2 ? shape.value_width : shape.key_width),
        first(head * kHeadChannels - part * shape.key_width) {}
  int part;  // 0: q; 1: k; 2: v.
  int64_t width;
  int64_t first;
};

}  // namespace oom::internal
