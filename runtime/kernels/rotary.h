// Rotary position embedding, rotate-half form, alone or behind the RMSNorm of each head:
//   n = norm(x) or x;  y1 = n1 cos - n2 sin,  y2 = n2 cos + n1 sin,
// where 1 and 2 are the halves of a head's first r elements and element i of both turns by
// position * theta^(-2i/r), i < pair count, or stays; y = n behind them.
// Backward: dn1 = dy1 cos + dy2 sin,  dn2 = dy2 cos - dy1 sin;  then dx and dw of the norm.
// cos and sin are what the table holds: with YaRN other frequencies, times the attention factor.
// The same roundings as runtime/ops/rotary and rms_norm: angles, cosine and sine are FP32, the
// table is rounded to T, so are n, each product, each sum, and dn before it meets the norm; xh is
// as the norm's scale has it. dx is rounded to T. T is BF16 or FP32. Shapes: T tokens, N heads, d
// head size (even; at most 512 with BF16, 256 with FP32), r rotary size (even, at most d). Tokens
// are `..._token_stride` elements apart and a token's heads `..._head_stride`, so that q and k may
// be slices of one projection's output, q beside its gate, and dq and dk of one gradient. Reads and
// writes vectors where r / 2 and (d - r) / 2 elements, the strides and the pointers are whole ones.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/model/description.h"

namespace oom {

// The cosines and sines of a batch, [T, r/2] each.
template <class T>
struct RotaryTableArguments {
  int64_t tokens = 0;
  int64_t rotary_size = 0;
  int64_t pair_count = 0;  // Of r/2; the others' angle is 0.
  double theta = 0.0;
  // Of YaRN (runtime/model/yarn.h): pair i is slow to the share clamp((i - ramp_low) / ramp_width,
  // 0, 1), and of slow pairs the frequency is divided by `factor`. 0: none.
  float factor = 0.0f;
  float ramp_low = 0.0f;
  float ramp_width = 1.0f;
  float attention_factor = 1.0f;
  T* cosine = nullptr;
  T* sine = nullptr;
};

void FillRotaryTable(const RotaryTableArguments<__nv_bfloat16>& arguments,
                     const int32_t* positions_T, cudaStream_t stream);
void FillRotaryTable(const RotaryTableArguments<__nv_bfloat16>& arguments,
                     const int64_t* positions_T, cudaStream_t stream);
void FillRotaryTable(const RotaryTableArguments<float>& arguments, const int32_t* positions_T,
                     cudaStream_t stream);
void FillRotaryTable(const RotaryTableArguments<float>& arguments, const int64_t* positions_T,
                     cudaStream_t stream);

struct RotaryShape {
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t head_size = 0;
  int64_t rotary_size = 0;
};

template <class T>
struct NormRotaryForwardArguments {
  const T* x_TNd = nullptr;
  int64_t x_token_stride = 0;
  int64_t x_head_stride = 0;  // 0: d, side by side.
  const T* norm_d = nullptr;  // Null: no norm.
  NormScale scale = NormScale::kWeightAfterRounding;
  float epsilon = 0.0f;
  const T* cosine = nullptr;
  const T* sine = nullptr;
  T* y_TNd = nullptr;  // May be x if the strides agree.
  int64_t y_token_stride = 0;
  int64_t y_head_stride = 0;  // 0: d, side by side.
};

void NormRotaryForward(const RotaryShape& shape,
                       const NormRotaryForwardArguments<__nv_bfloat16>& arguments,
                       cudaStream_t stream);
void NormRotaryForward(const RotaryShape& shape, const NormRotaryForwardArguments<float>& arguments,
                       cudaStream_t stream);

template <class T>
struct NormRotaryBackwardArguments {
  const T* dy_TNd = nullptr;
  int64_t dy_token_stride = 0;
  int64_t dy_head_stride = 0;  // 0: d, side by side.
  const T* x_TNd = nullptr;    // As given to forward; not read without a norm.
  int64_t x_token_stride = 0;
  int64_t x_head_stride = 0;  // 0: d, side by side.
  const T* norm_d = nullptr;  // Null: no norm.
  NormScale scale = NormScale::kWeightAfterRounding;
  float epsilon = 0.0f;
  const T* cosine = nullptr;
  const T* sine = nullptr;
  T* dx_TNd = nullptr;  // May be dy if the strides agree.
  int64_t dx_token_stride = 0;
  int64_t dx_head_stride = 0;  // 0: d, side by side.
  float* dnorm_d = nullptr;    // Accumulates; null: not wanted.
  float* scratch = nullptr;    // NormRotaryBackwardScratchBytes; null if dnorm is.
};

int64_t NormRotaryBackwardScratchBytes(const RotaryShape& shape);

void NormRotaryBackward(const RotaryShape& shape,
                        const NormRotaryBackwardArguments<__nv_bfloat16>& arguments,
                        cudaStream_t stream);
void NormRotaryBackward(const RotaryShape& shape,
                        const NormRotaryBackwardArguments<float>& arguments, cudaStream_t stream);

}  // namespace oom
