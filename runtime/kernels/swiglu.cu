#include <algorithm>
#include <type_traits>

#include "runtime/kernels/activation.cuh"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/packed.cuh"
#include "runtime/kernels/swiglu.h"

namespace oom {
namespace {

using internal::Activated;
using internal::ActivatedOf;
using internal::ActivationGradient;
using internal::DivideUp;
using internal::kPackedCount;
using internal::Load;
using internal::Pack;
using internal::Packed;
using internal::Product;
using internal::Store;
using internal::SumOverLanes;
using internal::WholeVectors;

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 4;  // A thread's rows in forward, so that eight loads are in flight.

// blockDim.x threads side by side in a row, blockDim.y rows at once.
template <class T, bool kWhole, Activation kActivation>
__global__ void __launch_bounds__(kThreads)
    SwigluForwardKernel(SwigluShape shape, const T* gate_up_RF, T* y_RI) {
  constexpr int kCount = kPackedCount<T>;
  const int64_t first_row = int64_t{blockIdx.x} * blockDim.y * kRowsAtOnce + threadIdx.y;
  for (int64_t column = threadIdx.x * kCount; column < shape.width; column += blockDim.x * kCount) {
    Packed<T> gate[kRowsAtOnce], up[kRowsAtOnce];
    int64_t left[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const int64_t row = first_row + k * blockDim.y;
      const T* const from = gate_up_RF + row * 2 * shape.width + column;
      left[k] = row < shape.rows ? shape.width - column : 0;
      gate[k] = Load<kWhole, kCount>(from, left[k]);
      up[k] = Load<kWhole, kCount>(from + shape.width, left[k]);
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const int64_t row = first_row + k * blockDim.y;
      float act[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) act[i] = ActivatedOf<kActivation, T>(gate[k][i]).value;
      Store<kWhole>(y_RI + row * shape.width + column, Product(Pack<T>(act), up[k]), left[k]);
    }
  }
}

// A warp a row, since dw is a sum over it.
template <class T, bool kWhole, Activation kActivation>
__global__ void __launch_bounds__(kThreads)
    SwigluBackwardKernel(SwigluShape shape, SwigluBackwardArguments<T> a) {
  constexpr int kCount = kPackedCount<T>;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row >= shape.rows) return;
  const int lane = threadIdx.x % 32;
  const float weight = a.weight_R == nullptr ? 1.0f : a.weight_R[row];
  float dweight = 0.0f;
  for (int64_t column = lane * kCount; column < shape.width; column += 32 * kCount) {
    const int64_t left = shape.width - column;
    const T* const gate_at = a.gate_up_RF + row * 2 * shape.width + column;
    const Packed<T> da = Load<kWhole, kCount>(a.da_RI + row * shape.width + column, left);
    const Packed<T> gate = Load<kWhole, kCount>(gate_at, left);
    const Packed<T> up = Load<kWhole, kCount>(gate_at + shape.width, left);

    float logistic[kCount], act_values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Activated of_gate = ActivatedOf<kActivation, T>(gate[i]);
      logistic[i] = of_gate.logistic;
      act_values[i] = of_gate.value;
    }
    const Packed<T> act = Pack<T>(act_values);
    const Packed<T> activated = Product(act, up);
    float weighted[kCount], d[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      dweight += da[i] * activated[i];
      weighted[i] = activated[i] * weight;
      d[i] = da[i] * weight;
    }
    if (a.weighted_RI != nullptr) {
      Store<kWhole>(a.weighted_RI + row * shape.width + column, Pack<T>(weighted), left);
    }
    const Packed<T> weighted_da = Pack<T>(d);
    const Packed<T> dact = Product(weighted_da, up);
    float dgate[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      dgate[i] = ActivationGradient<kActivation>(dact[i], gate[i], logistic[i]);
    }
    T* const dgate_at = a.dgate_up_RF + row * 2 * shape.width + column;
    Store<kWhole>(dgate_at, Pack<T>(dgate), left);
    Store<kWhole>(dgate_at + shape.width, Product(weighted_da, act), left);
  }
  if (a.dweight_R == nullptr) return;
  dweight = SumOverLanes<32>(dweight);
  if (lane == 0) a.dweight_R[row] = dweight;
}

// Calls launch(the activation, as std::integral_constant).
template <class Launch>
void WithActivation(Activation activation, const Launch& launch) {
  if (activation == Activation::kGeluTanh) {
    launch(std::integral_constant<Activation, Activation::kGeluTanh>());
  } else {
    launch(std::integral_constant<Activation, Activation::kSilu>());
  }
}

template <class T>
void Forward(const SwigluShape& shape, const T* gate_up_RF, T* y_RI, cudaStream_t stream) {
  OOM_CHECK(shape.rows >= 0 && shape.width > 0);
  if (shape.rows == 0) return;
  const int64_t vectors = DivideUp(shape.width, kPackedCount<T>);
  const int across = static_cast<int>(std::min<int64_t>(DivideUp(vectors, 32) * 32, kThreads));
  const dim3 threads(across, kThreads / across);
  const auto blocks = static_cast<unsigned>(DivideUp(shape.rows, threads.y * kRowsAtOnce));
  const bool whole = WholeVectors(shape.width * sizeof(T), gate_up_RF, y_RI);
  WithActivation(shape.activation, [&](auto activation) {
    const auto kernel = whole ? SwigluForwardKernel<T, true, activation()>
                              : SwigluForwardKernel<T, false, activation()>;
    kernel<<<blocks, threads, 0, stream>>>(shape, gate_up_RF, y_RI);
  });
  CheckLaunch("SwigluForward");
}

template <class T>
void Backward(const SwigluShape& shape, const SwigluBackwardArguments<T>& a, cudaStream_t stream) {
  OOM_CHECK(shape.rows >= 0 && shape.width > 0);
  if (shape.rows == 0) return;
  const auto blocks = static_cast<unsigned>(DivideUp(shape.rows, kThreads / 32));
  const bool whole =
      WholeVectors(shape.width * sizeof(T), a.da_RI, a.gate_up_RF, a.dgate_up_RF, a.weighted_RI);
  WithActivation(shape.activation, [&](auto activation) {
    const auto kernel = whole ? SwigluBackwardKernel<T, true, activation()>
                              : SwigluBackwardKernel<T, false, activation()>;
    kernel<<<blocks, kThreads, 0, stream>>>(shape, a);
  });
  CheckLaunch("SwigluBackward");
}

}  // namespace

void SwigluForward(const SwigluShape& shape, const __nv_bfloat16* gate_up_RF, __nv_bfloat16* y_RI,
                   cudaStream_t stream) {
  Forward(shape, gate_up_RF, y_RI, stream);
}
void SwigluForward(const SwigluShape& shape, const float* gate_up_RF, float* y_RI,
                   cudaStream_t stream) {
  Forward(shape, gate_up_RF, y_RI, stream);
}

void SwigluBackward(const SwigluShape& shape,
                    const SwigluBackwardArguments<__nv_bfloat16>& arguments, cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void SwigluBackward(const SwigluShape& shape, const SwigluBackwardArguments<float>& arguments,
                    cudaStream_t stream) {
  Backward(shape, arguments, stream);
}

}  // namespace oom
