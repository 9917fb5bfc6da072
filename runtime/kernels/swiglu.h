// Gated activation: a = act(gate) * up, act (SiLU or GELU's tanh form) rounded to T before the
// product, as runtime/ops/swiglu.
// Backward with each row's routing weight w (1 without one), as runtime/ops/experts:
//   d = da * w;  dup = d * act(gate);  dgate = d * up * act'(gate);  dw = <da, a>, FP32;
//   weighted = a * w, the operand of the down product's weight gradient.
// d, act, d * up and every output but dw are rounded to T. (runtime/ops keeps `weighted` wide:
// here it is rounded once, since the product takes T.) Shapes: R rows, I width, F = 2I; gate_up [R,
// F] (columns 0..I-1 gate, I..2I-1 up); contiguous. T is BF16 or FP32. Keeps nothing.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/model/description.h"

namespace oom {

struct SwigluShape {
  int64_t rows = 0;
  int64_t width = 0;
  Activation activation = Activation::kSilu;
};

void SwigluForward(const SwigluShape& shape, const __nv_bfloat16* gate_up_RF, __nv_bfloat16* y_RI,
                   cudaStream_t stream);
void SwigluForward(const SwigluShape& shape, const float* gate_up_RF, float* y_RI,
                   cudaStream_t stream);

template <class T>
struct SwigluBackwardArguments {
  const T* da_RI = nullptr;
  const T* gate_up_RF = nullptr;
  const float* weight_R = nullptr;  // Null: 1.
  T* dgate_up_RF = nullptr;         // May be gate_up.
  T* weighted_RI = nullptr;         // May be da; null: not wanted.
  float* dweight_R = nullptr;       // Null: not wanted.
};

void SwigluBackward(const SwigluShape& shape,
                    const SwigluBackwardArguments<__nv_bfloat16>& arguments, cudaStream_t stream);
void SwigluBackward(const SwigluShape& shape, const SwigluBackwardArguments<float>& arguments,
                    cudaStream_t stream);

}  // namespace oom
