#include <algorithm>

#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/output_gate.h"
#include "runtime/kernels/packed.cuh"

namespace oom {
namespace {

using internal::DivideUp;
using internal::kPackedCount;
using internal::Load;
using internal::LogisticOf;
using internal::Pack;
using internal::Packed;
using internal::Product;
using internal::Store;
using internal::WholeVectors;

using Element = __nv_bfloat16;
constexpr int kCount = kPackedCount<Element>;
constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 4;  // A thread's rows in forward, so that eight loads are in flight.

__device__ Packed<Element> Logistics(const Packed<Element>& gate) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = LogisticOf<Element>(gate[i]).value;
  return Pack<Element>(values);
}

// blockDim.x threads side by side in a row, blockDim.y rows at once.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads)
    OutputGateForwardKernel(OutputGateShape shape, const Element* o_Rd, const Element* gate_Rd,
                            Element* a_Rd) {
  const int64_t first_row = int64_t{blockIdx.x} * blockDim.y * kRowsAtOnce + threadIdx.y;
  for (int64_t column = threadIdx.x * kCount; column < shape.width; column += blockDim.x * kCount) {
    Packed<Element> o[kRowsAtOnce], gate[kRowsAtOnce];
    int64_t left[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const int64_t row = first_row + k * blockDim.y;
      left[k] = row < shape.rows ? shape.width - column : 0;
      o[k] = Load<kWhole, kCount>(o_Rd + row * shape.width + column, left[k]);
      gate[k] = Load<kWhole, kCount>(gate_Rd + row * shape.gate_stride + column, left[k]);
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const int64_t row = first_row + k * blockDim.y;
      Store<kWhole>(a_Rd + row * shape.width + column, Product(o[k], Logistics(gate[k])), left[k]);
    }
  }
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads)
    OutputGateBackwardKernel(OutputGateShape shape, OutputGateBackwardArguments arguments) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= shape.rows) return;
  for (int64_t column = threadIdx.x * kCount; column < shape.width; column += blockDim.x * kCount) {
    const int64_t left = shape.width - column;
    const int64_t place = row * shape.width + column;
    const int64_t gate_place = row * shape.gate_stride + column;
    const Packed<Element> da = Load<kWhole, kCount>(arguments.da_Rd + place, left);
    const Packed<Element> o = Load<kWhole, kCount>(arguments.o_Rd + place, left);
    const Packed<Element> s = Logistics(Load<kWhole, kCount>(arguments.gate_Rd + gate_place, left));
    const Packed<Element> ds = Product(da, o);
    float dgate[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) dgate[i] = ds[i] * (1.0f - s[i]) * s[i];
    Store<kWhole>(arguments.a_Rd + place, Product(o, s), left);
    Store<kWhole>(arguments.do_Rd + place, Product(da, s), left);
    Store<kWhole>(arguments.dgate_Rd + gate_place, Pack<Element>(dgate), left);
  }
}

// Threads of a block: a row's vectors side by side, up to 256.
dim3 ThreadsOf(const OutputGateShape& shape) {
  const int64_t vectors = DivideUp(shape.width, kCount);
  unsigned across = 8;
  while (across < vectors && across < kThreads) across *= 2;
  return dim3(across, kThreads / across);
}

template <class... Pointer>
bool Whole(const OutputGateShape& shape, const Pointer*... pointers) {
  constexpr int64_t kBytes = sizeof(Element);
  return WholeVectors(shape.width * kBytes, pointers...) &&
         WholeVectors(shape.gate_stride * kBytes);
}

}  // namespace

void OutputGateForward(const OutputGateShape& shape, const __nv_bfloat16* o_Rd,
                       const __nv_bfloat16* gate_Rd, __nv_bfloat16* a_Rd, cudaStream_t stream) {
  OOM_CHECK(shape.rows >= 0 && shape.width > 0 && shape.gate_stride >= shape.width);
  if (shape.rows == 0) return;
  const dim3 threads = ThreadsOf(shape);
  const auto blocks = static_cast<unsigned>(DivideUp(shape.rows, threads.y * kRowsAtOnce));
  const auto kernel = Whole(shape, o_Rd, gate_Rd, a_Rd) ? OutputGateForwardKernel<true>
                                                        : OutputGateForwardKernel<false>;
  kernel<<<blocks, threads, 0, stream>>>(shape, o_Rd, gate_Rd, a_Rd);
  CheckLaunch("OutputGateForward");
}

void OutputGateBackward(const OutputGateShape& shape, const OutputGateBackwardArguments& arguments,
                        cudaStream_t stream) {
  OOM_CHECK(shape.rows >= 0 && shape.width > 0 && shape.gate_stride >= shape.width);
  if (shape.rows == 0) return;
  const dim3 threads = ThreadsOf(shape);
  const auto blocks = static_cast<unsigned>(DivideUp(shape.rows, threads.y));
  const bool whole = Whole(shape, arguments.da_Rd, arguments.o_Rd, arguments.gate_Rd,
                           arguments.a_Rd, arguments.do_Rd, arguments.dgate_Rd);
  const auto kernel = whole ? OutputGateBackwardKernel<true> : OutputGateBackwardKernel<false>;
  kernel<<<blocks, threads, 0, stream>>>(shape, arguments);
  CheckLaunch("OutputGateBackward");
}

}  // namespace oom
