#include <algorithm>
#include <type_traits>

#include "runtime/kernels/launch.h"
#include "runtime/kernels/packed.cuh"
#include "runtime/kernels/partial_rows.h"
#include "runtime/kernels/rms_norm.h"

namespace oom {
namespace {

using internal::DivideUp;
using internal::Forget;
using internal::kPackedCount;
using internal::Load;
using internal::Pack;
using internal::Packed;
using internal::Product;
using internal::Store;
using internal::Sum;
using internal::SumOverBlock;
using internal::SumOverLanes;
using internal::WholeVectors;

// Forward: a row lies in the registers of kRowThreads threads, kVectors x 16 bytes in each: 16
// lanes (a head), a warp, or a whole block of 256. Many loads in flight are what saturates the
// memory.
constexpr int kForwardThreads = 128;

// What is added to the rows: nothing, a residual before the norm, or an addend (and a factor, or
// that alone) behind it.
enum class Around { kNothing, kResidual, kAddend };

// y behind its addend and its factor, rounded after each. What is null changes nothing.
template <class T>
__device__ Packed<T> Finished(Packed<T> y, const Packed<T>& addend,
                              const RmsNormForwardArguments<T>& a) {
  if (a.addend_RH != nullptr) y = Sum(y, addend);
  if (a.factor == nullptr) return y;
  const float factor = *a.factor;
  float product[kPackedCount<T>];
#pragma unroll
  for (int i = 0; i < kPackedCount<T>; ++i) product[i] = y[i] * factor;
  return Pack<T>(product);
}

// kRoundFirst: xh is rounded before it meets the weight; otherwise a weight may be missing.
template <class T, int kRowThreads, int kVectors, bool kWhole, Around kAround, bool kRoundFirst>
__global__ void __launch_bounds__(kRowThreads > 32 ? kRowThreads : kForwardThreads)
    RmsNormForwardKernel(RmsNormShape shape, RmsNormForwardArguments<T> a) {
  constexpr int kCount = kPackedCount<T>;
  const int lane = threadIdx.x % kRowThreads;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / kRowThreads) + threadIdx.x / kRowThreads;
  // Lanes behind the last row take part in the shuffles.
  const int64_t width = row < shape.rows ? shape.width : 0;
  const int64_t start = row * shape.width;

  Packed<T> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t column = (k * kRowThreads + lane) * kCount;
    x[k] = Load<kWhole, kCount>(a.x_RH + start + column, width - column);
  }
  Packed<T> added[kVectors];
  if constexpr (kAround != Around::kNothing) {
    const T* const from = kAround == Around::kResidual ? a.residual_RH : a.addend_RH;
    const int64_t there = kAround == Around::kResidual || from != nullptr ? width : 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t column = (k * kRowThreads + lane) * kCount;
      added[k] = Load<kWhole, kCount>(from + start + column, there - column);
    }
  }
  if constexpr (kAround == Around::kResidual) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t column = (k * kRowThreads + lane) * kCount;
      x[k] = Sum(x[k], added[k]);
      Store<kWhole>(a.sum_RH + start + column, x[k], width - column);
    }
  }

  float squares[1] = {0.0f};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) part += x[k][i] * x[k][i];
    squares[0] += part;
  }
  if constexpr (kRowThreads > 32) {
    __shared__ float buffer[32][1];
    SumOverBlock(squares, buffer);
  } else {
    squares[0] = SumOverLanes<kRowThreads>(squares[0]);
  }
  const float r = rsqrtf(squares[0] / static_cast<float>(shape.width) + a.epsilon);

  // Of s = offset + w.
  const bool plus_one = a.scale == NormScale::kOnePlusWeight || a.weight_H == nullptr;
  const float offset = plus_one ? 1.0f : 0.0f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t column = (k * kRowThreads + lane) * kCount;
    const bool weighted = kRoundFirst || a.weight_H != nullptr;
    const Packed<T> weight =
        Load<kWhole, kCount>(a.weight_H + column, weighted ? width - column : 0);
    float normalized[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) normalized[i] = x[k][i] * r;
    Packed<T> y;
    if constexpr (kRoundFirst) {
      y = Product(Pack<T>(normalized), weight);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) normalized[i] *= offset + weight[i];
      y = Pack<T>(normalized);
    }
    if constexpr (kAround == Around::kAddend) y = Finished(y, added[k], a);
    Store<kWhole>(a.y_RH + start + column, y, width - column);
  }
}

// Backward: a row lies in a half warp (a head), a warp, or the whole block; each thread keeps its
// columns' share of dw in registers over all the rows of its block.
constexpr int kWholeBlock = 0;
constexpr int kGroupedThreads = 256;
// Blocks, and so rows of partial sums: four of 256 threads on each of 132 multiprocessors. A fixed
// number, since the order of summation follows from it.
constexpr int kPartialRows = 528;

// What a thread holds of a row.
template <class T, class Dy, class Residual, int kVectors>
struct RowVectors {
  Packed<T> x[kVectors];
  Packed<Dy, kPackedCount<T>> dy[kVectors];
  Packed<Residual, kPackedCount<T>> residual[kVectors];
};

// kPlusOne: s = 1 + w, where a missing weight is zero.
template <class T, class Dy, class Dx, class Residual, int kLanes, int kVectors, bool kWhole,
          bool kPlusOne>
__global__ void __launch_bounds__(kLanes == kWholeBlock ? 1024 : kGroupedThreads)
    RmsNormBackwardKernel(RmsNormShape shape, RmsNormBackwardArguments<T, Dy, Dx, Residual> a) {
  constexpr int kCount = kPackedCount<T>;
  constexpr int kGroups = kLanes == kWholeBlock ? 1 : kGroupedThreads / kLanes;
  const int row_threads = kLanes == kWholeBlock ? blockDim.x : kLanes;
  const int lane = kLanes == kWholeBlock ? threadIdx.x : threadIdx.x % kLanes;
  const int group = kLanes == kWholeBlock ? 0 : threadIdx.x / kLanes;
  const float reciprocal_width = 1.0f / static_cast<float>(shape.width);
  __shared__ float buffers[2][32][2];
  int buffer = 0;

  Packed<T> weight[kVectors];
  float dweight[kVectors][kCount] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t column = (k * row_threads + lane) * kCount;
    const bool weighted = !kPlusOne || a.weight_H != nullptr;
    weight[k] = Load<kWhole, kCount>(a.weight_H + column, weighted ? shape.width - column : 0);
  }
  const auto scale = [&](int k, int i) { return kPlusOne ? 1.0f + weight[k][i] : weight[k][i]; };

  const auto width_of = [&](int64_t row) { return row < shape.rows ? shape.width : int64_t{0}; };
  const auto load = [&](int64_t row) {
    RowVectors<T, Dy, Residual, kVectors> loaded;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t column = (k * row_threads + lane) * kCount;
      const int64_t left = width_of(row) - column, place = row * shape.width + column;
      loaded.x[k] = Load<kWhole, kCount>(a.x_RH + place, left);
      loaded.dy[k] = Load<kWhole, kCount>(a.dy_RH + place, left);
      loaded.residual[k] = {};
      if (a.residual_gradient_RH != nullptr) {
        loaded.residual[k] = Load<kWhole, kCount>(a.residual_gradient_RH + place, left);
      }
    }
    return loaded;
  };

  // Where the registers allow it, the next row is under way while this one is worked on.
  constexpr bool kAhead = kLanes == kWholeBlock && kVectors == 1 && sizeof(Residual) == sizeof(T);
  const int64_t step = int64_t{gridDim.x} * kGroups;
  int64_t row = int64_t{blockIdx.x} * kGroups + group;
  RowVectors<T, Dy, Residual, kVectors> next;
  if constexpr (kAhead) next = load(row);
  for (; row - group < shape.rows; row += step) {
    if constexpr (!kAhead) next = load(row);
    auto [x, dy, residual] = next;
    if constexpr (kAhead) next = load(row + step);
    const int64_t width = width_of(row), start = row * shape.width;

    float sums[2] = {0.0f, 0.0f};  // Of x^2 and of x * dy * s.
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[0] += x[k][i] * x[k][i];
        sums[1] += x[k][i] * (dy[k][i] * scale(k, i));
      }
    }
    if constexpr (kLanes == kWholeBlock) {
      SumOverBlock(sums, buffers[buffer]);
      buffer ^= 1;
    } else {
      sums[0] = SumOverLanes<kLanes>(sums[0]);
      sums[1] = SumOverLanes<kLanes>(sums[1]);
    }
    if (width == 0) continue;
    const float r = rsqrtf(sums[0] * reciprocal_width + a.epsilon);
    const float mean = sums[1] * r * reciprocal_width;

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t column = (k * row_threads + lane) * kCount;
      Forget(&x[k]);
      Forget(&dy[k]);
      float dx[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float normalized = x[k][i] * r;
        dweight[k][i] += dy[k][i] * normalized;
        dx[i] = (dy[k][i] * scale(k, i) - normalized * mean) * r + residual[k][i];
      }
      Store<kWhole>(a.dx_RH + start + column, Pack<Dx>(dx), width - column);
    }
  }

  if (a.dweight_H == nullptr) return;
  float* const partial = a.scratch + blockIdx.x * shape.width;
  if constexpr (kLanes == kWholeBlock) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t column = (k * row_threads + lane) * kCount;
      Store<kWhole>(partial + column, Pack<float>(dweight[k]), shape.width - column);
    }
  } else {
    __shared__ float by_group[kGroups][kLanes * kVectors * kCount];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        by_group[group][(k * kLanes + lane) * kCount + i] = dweight[k][i];
      }
    }
    __syncthreads();
    for (int64_t column = threadIdx.x; column < shape.width; column += kGroupedThreads) {
      float sum = 0.0f;
      for (int g = 0; g < kGroups; ++g) sum += by_group[g][column];
      partial[column] = sum;
    }
  }
}

template <int kRowThreads, int kVectors, bool kWhole, class T>
void LaunchForward(const RmsNormShape& shape, const RmsNormForwardArguments<T>& a,
                   cudaStream_t stream) {
  const int threads = std::max(kRowThreads, kForwardThreads);
  const auto blocks = static_cast<unsigned>(DivideUp(shape.rows, threads / kRowThreads));
  const auto launch = [&](auto around, auto round_first) {
    RmsNormForwardKernel<T, kRowThreads, kVectors, kWhole, around(), round_first()>
        <<<blocks, threads, 0, stream>>>(shape, a);
  };
  const auto launch_around = [&](auto around) {
    const bool round_first = a.scale == NormScale::kWeightAfterRounding && a.weight_H != nullptr;
    round_first ? launch(around, std::true_type()) : launch(around, std::false_type());
  };
  if (a.residual_RH != nullptr) {
    launch_around(std::integral_constant<Around, Around::kResidual>());
  } else if (a.addend_RH != nullptr || a.factor != nullptr) {
    launch_around(std::integral_constant<Around, Around::kAddend>());
  } else {
    launch_around(std::integral_constant<Around, Around::kNothing>());
  }
  CheckLaunch("RmsNormForward");
}

template <class T>
void Forward(const RmsNormShape& shape, const RmsNormForwardArguments<T>& a, cudaStream_t stream) {
  const int64_t vectors = DivideUp(shape.width, kPackedCount<T>);
  OOM_CHECK(shape.rows >= 0 && shape.width > 0 && vectors <= 4096);
  OOM_CHECK(a.residual_RH == nullptr || (a.addend_RH == nullptr && a.factor == nullptr));
  if (shape.rows == 0) return;
  if (!WholeVectors(shape.width * sizeof(T), a.x_RH, a.residual_RH, a.weight_H, a.addend_RH,
                    a.sum_RH, a.y_RH)) {
    LaunchForward<256, 16, false>(shape, a, stream);
  } else if (vectors <= 16) {
    LaunchForward<16, 1, true>(shape, a, stream);
  } else if (vectors <= 128) {
    LaunchForward<32, 4, true>(shape, a, stream);
  } else if (vectors <= 256) {
    LaunchForward<32, 8, true>(shape, a, stream);
  } else if (vectors <= 512) {
    LaunchForward<32, 16, true>(shape, a, stream);
  } else if (vectors <= 1024) {
    LaunchForward<256, 4, true>(shape, a, stream);
  } else {
    LaunchForward<256, 16, true>(shape, a, stream);
  }
}

template <int kLanes, int kVectors, bool kWhole, class T, class Dy, class Dx, class Residual>
void LaunchBackward(const RmsNormShape& shape,
                    const RmsNormBackwardArguments<T, Dy, Dx, Residual>& a, cudaStream_t stream) {
  const int64_t vectors = DivideUp(shape.width, kPackedCount<T>);
  const int threads = kLanes == kWholeBlock
                          ? static_cast<int>(DivideUp(DivideUp(vectors, kVectors), 32) * 32)
                          : kGroupedThreads;
  const int64_t rows_at_once = kLanes == kWholeBlock ? 1 : kGroupedThreads / kLanes;
  const int64_t blocks = std::min<int64_t>(kPartialRows, DivideUp(shape.rows, rows_at_once));
  const bool plus_one = a.scale == NormScale::kOnePlusWeight || a.weight_H == nullptr;
  const auto kernel =
      plus_one ? RmsNormBackwardKernel<T, Dy, Dx, Residual, kLanes, kVectors, kWhole, true>
               : RmsNormBackwardKernel<T, Dy, Dx, Residual, kLanes, kVectors, kWhole, false>;
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(shape, a);
  CheckLaunch("RmsNormBackward");
  if (a.dweight_H == nullptr) return;
  AddPartialRows(a.scratch, blocks, shape.width, a.dweight_H, stream);
}

template <class T, class Dy, class Dx, class Residual>
void Backward(const RmsNormShape& shape, const RmsNormBackwardArguments<T, Dy, Dx, Residual>& a,
              cudaStream_t stream) {
  const int64_t vectors = DivideUp(shape.width, kPackedCount<T>);
  OOM_CHECK(shape.rows >= 0 && shape.width > 0 && vectors <= 2048);
  OOM_CHECK(a.dweight_H == nullptr || (a.scratch != nullptr && a.weight_H != nullptr));
  if (shape.rows == 0) return;
  if (!WholeVectors(shape.width * sizeof(T), a.dy_RH, a.x_RH, a.weight_H, a.residual_gradient_RH,
                    a.dx_RH, a.scratch)) {
    LaunchBackward<kWholeBlock, 2, false>(shape, a, stream);
  } else if (vectors <= 16) {
    LaunchBackward<16, 1, true>(shape, a, stream);
  } else if (vectors <= 32) {
    LaunchBackward<32, 1, true>(shape, a, stream);
  } else if (vectors <= 1024) {
    LaunchBackward<kWholeBlock, 1, true>(shape, a, stream);
  } else {
    LaunchBackward<kWholeBlock, 2, true>(shape, a, stream);
  }
}

}  // namespace

void RmsNormForward(const RmsNormShape& shape,
                    const RmsNormForwardArguments<__nv_bfloat16>& arguments, cudaStream_t stream) {
  Forward(shape, arguments, stream);
}
void RmsNormForward(const RmsNormShape& shape, const RmsNormForwardArguments<float>& arguments,
                    cudaStream_t stream) {
  Forward(shape, arguments, stream);
}

int64_t RmsNormBackwardScratchBytes(const RmsNormShape& shape) {
  return kPartialRows * shape.width * static_cast<int64_t>(sizeof(float));
}

void RmsNormBackward(const RmsNormShape& shape, const Bfloat16RmsNormBackward& arguments,
                     cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, float, __nv_bfloat16>& arguments,
                     cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, __nv_bfloat16, float>& arguments,
                     cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, float, float>& arguments,
                     cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void RmsNormBackward(
    const RmsNormShape& shape,
    const RmsNormBackwardArguments<__nv_bfloat16, float, __nv_bfloat16, float>& arguments,
    cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<__nv_bfloat16, float, float, float>& arguments,
                     cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void RmsNormBackward(const RmsNormShape& shape,
                     const RmsNormBackwardArguments<float, float, float>& arguments,
                     cudaStream_t stream) {
  Backward(shape, arguments, stream);
}

}  // namespace oom
