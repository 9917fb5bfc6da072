// The gate behind attention, as runtime/ops/attention: a = o * s, s = logistic(gate).
// Backward: do = da * s;  dgate = da * o * s * (1 - s);  a is made again, an operand of the output
// projection's weight gradient.
// s, da * o and all results are rounded to BF16, as the composite does. Shapes: R rows, a head of a
// token each, d wide; o, a and their gradients are contiguous, rows of the gate and of its gradient
// `gate_stride` elements apart: the second half of [query | gate]. Keeps nothing.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct OutputGateShape {
  int64_t rows = 0;
  int64_t width = 0;
  int64_t gate_stride = 0;
};

void OutputGateForward(const OutputGateShape& shape, const __nv_bfloat16* o_Rd,
                       const __nv_bfloat16* gate_Rd, __nv_bfloat16* a_Rd, cudaStream_t stream);

struct OutputGateBackwardArguments {
  const __nv_bfloat16* da_Rd = nullptr;
  const __nv_bfloat16* o_Rd = nullptr;
  const __nv_bfloat16* gate_Rd = nullptr;
  __nv_bfloat16* a_Rd = nullptr;
  __nv_bfloat16* do_Rd = nullptr;  // May be da.
  __nv_bfloat16* dgate_Rd = nullptr;
};

void OutputGateBackward(const OutputGateShape& shape, const OutputGateBackwardArguments& arguments,
                        cudaStream_t stream);

}  // namespace oom
