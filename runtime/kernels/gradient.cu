#include "runtime/kernels/gradient.h"

#include <algorithm>
#include <limits>

#include "runtime/kernels/gradient_partials.cuh"
#include "runtime/kernels/launch.h"

namespace oom {
namespace {

using internal::Bfloat16Bits;
using internal::DivideUp;
using internal::kBlockElements;
using internal::kPackedCount;
using internal::Load;
using internal::Packed;
using internal::PartialPointers;
using internal::PointersTo;
using internal::Store;
using internal::Sum;
using internal::SumPartials;
using internal::WholeVectors;

constexpr int kThreads = 256;
// Each thread takes four times four elements, a block 4,096.
constexpr int kCount = 4;
constexpr int kSets = kBlockElements / (kThreads * kCount);

template <bool kWhole>
__global__ void __launch_bounds__(kThreads)
    RoundToBfloat16Kernel(const float* values, int64_t elements, uint16_t* out) {
  const int64_t first = int64_t{blockIdx.x} * kBlockElements + threadIdx.x * kCount;
  Packed<float, kCount> x[kSets];
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    const int64_t i = first + s * kThreads * kCount;
    x[s] = Load<kWhole, kCount>(values + i, elements - i);
  }
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    const int64_t i = first + s * kThreads * kCount;
    Packed<uint16_t, kCount> rounded;
#pragma unroll
    for (int word = 0; word < rounded.kWords; ++word) {
      rounded.words[word] =
          Bfloat16Bits(x[s].words[2 * word]) | Bfloat16Bits(x[s].words[2 * word + 1]) << 16;
    }
    Store<kWhole>(out + i, rounded, elements - i);
  }
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads)
    AccumulateFloat32Kernel(const float* values, int64_t elements, float* accumulator) {
  const int64_t stride = int64_t{gridDim.x} * kBlockElements;
  for (int64_t first = int64_t{blockIdx.x} * kBlockElements + threadIdx.x * kCount;
       first < elements; first += stride) {
    Packed<float, kCount> x[kSets], sum[kSets];
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const int64_t i = first + s * kThreads * kCount;
      x[s] = Load<kWhole, kCount>(values + i, elements - i);
      sum[s] = Load<kWhole, kCount>(accumulator + i, elements - i);
    }
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const int64_t i = first + s * kThreads * kCount;
      Store<kWhole>(accumulator + i, Sum(sum[s], x[s]), elements - i);
    }
  }
}

// 32 KiB in flight a block: 16 fill the bus.
constexpr int64_t kHostAccumulationBlocks = 16;

void Accumulate(const float* values, int64_t elements, float* accumulator, int64_t most_blocks,
                cudaStream_t stream) {
  OOM_CHECK(elements >= 0);
  if (elements == 0) return;
  const auto grid =
      static_cast<unsigned>(std::min(DivideUp(elements, kBlockElements), most_blocks));
  if (WholeVectors(elements * sizeof(float), values, accumulator)) {
    AccumulateFloat32Kernel<true><<<grid, kThreads, 0, stream>>>(values, elements, accumulator);
  } else {
    AccumulateFloat32Kernel<false><<<grid, kThreads, 0, stream>>>(values, elements, accumulator);
  }
  CheckLaunch("AccumulateFloat32");
}

// Half a warp a 4,096-block, since a lane's sum is sequential. Vectors are loaded as they lie and
// turned through shared memory: element i belongs to lane i mod 16.
constexpr int kLanes = 16;
constexpr int kBlocksAtOnce = kThreads / kLanes;
constexpr int kPiece = kLanes * 8;         // Elements turned at a time.
constexpr int kPieceStride = kPiece + 16;  // The two halves of a warp use different banks.

template <class Element, bool kRounds>
__global__ void __launch_bounds__(kThreads)
    GradientSquaresKernel(PartialPointers<Element, kRounds> partials, int64_t blocks,
                          double* block_squares, int32_t* finite) {
  constexpr int kVector = kPackedCount<Element>;
  constexpr int kVectors = 8 / kVector;  // Of a thread in a piece.
  __shared__ alignas(16) float pieces[kBlocksAtOnce][kPieceStride];
  const int lane = threadIdx.x % kLanes;
  float* const piece = pieces[threadIdx.x / kLanes];
  const int64_t own = int64_t{blockIdx.x} * kBlocksAtOnce + threadIdx.x / kLanes;
  // Behind the last block: the same work again, for the warp's barriers, and nothing stored.
  const int64_t start = (own < blocks ? own : blocks - 1) * kBlockElements;

  double sum = 0.0;
  for (int first = 0; first < kBlockElements; first += kPiece) {
    float values[kVectors][kVector];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      SumPartials(partials, start + first + (v * kLanes + lane) * kVector, values[v]);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        *reinterpret_cast<float4*>(piece + (v * kLanes + lane) * kVector + i) =
            make_float4(values[v][i], values[v][i + 1], values[v][i + 2], values[v][i + 3]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < kPiece / kLanes; ++row) {
      const double x = piece[row * kLanes + lane];
      sum = __fma_rn(x, x, sum);  // The square of an FP32 value is exact.
    }
    __syncwarp();
  }
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xFFFFFFFFu, sum, half, kLanes);
  }
  if (lane != 0 || own >= blocks) return;
  if (!isfinite(sum)) *finite = 0;
  block_squares[own] = isnan(sum) ? __longlong_as_double(0x7FF8000000000000) : sum;
}

constexpr int kTile = 2048;

__global__ void __launch_bounds__(kThreads)
    AddSquaresInOrderKernel(const double* block_squares, int64_t blocks, double* sum) {
  __shared__ double tiles[2][kTile];
  double next[kTile / kThreads];
  double total = *sum;
  int current = 1;
  // The other threads fetch a tile while the first adds up the one before.
  for (int64_t first = -kTile; first < blocks; first += kTile) {
#pragma unroll
    for (int k = 0; k < kTile / kThreads; ++k) {
      const int64_t i = first + kTile + k * kThreads + threadIdx.x;
      next[k] = i < blocks ? block_squares[i] : 0.0;
    }
    if (first >= 0 && threadIdx.x == 0) {
      const int count = static_cast<int>(min(int64_t{kTile}, blocks - first));
#pragma unroll 16
      for (int i = 0; i < count; ++i) total += tiles[current][i];
    }
    current ^= 1;
#pragma unroll
    for (int k = 0; k < kTile / kThreads; ++k) tiles[current][k * kThreads + threadIdx.x] = next[k];
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum = total;
}

template <class Element, bool kRounds>
void Squares(const PartialPointers<Element, kRounds>& partials, int64_t elements,
             double* block_squares, int32_t* finite, cudaStream_t stream) {
  OOM_CHECK(elements >= 0 && elements % kBlockElements == 0);
  const int64_t blocks = elements / kBlockElements;
  if (blocks == 0) return;
  const auto grid = static_cast<unsigned>(DivideUp(blocks, kBlocksAtOnce));
  GradientSquaresKernel<<<grid, kThreads, 0, stream>>>(partials, blocks, block_squares, finite);
  CheckLaunch("GradientSquares");
}

}  // namespace

void RoundToBfloat16(const float* values, int64_t elements, uint16_t* out, cudaStream_t stream) {
  OOM_CHECK(elements >= 0);
  if (elements == 0) return;
  const auto grid = static_cast<unsigned>(DivideUp(elements, kBlockElements));
  if (WholeVectors(elements * sizeof(float), values, out)) {
    RoundToBfloat16Kernel<true><<<grid, kThreads, 0, stream>>>(values, elements, out);
  } else {
    RoundToBfloat16Kernel<false><<<grid, kThreads, 0, stream>>>(values, elements, out);
  }
  CheckLaunch("RoundToBfloat16");
}

void AccumulateFloat32(const float* values, int64_t elements, float* accumulator,
                       cudaStream_t stream) {
  Accumulate(values, elements, accumulator, std::numeric_limits<int64_t>::max(), stream);
}
void AccumulateFloat32OnHost(const float* values, int64_t elements, float* accumulator,
                             cudaStream_t stream) {
  Accumulate(values, elements, accumulator, kHostAccumulationBlocks, stream);
}

void GradientSquares(const Bfloat16Partials& gradient, int64_t elements, double* block_squares,
                     int32_t* finite, cudaStream_t stream) {
  Squares(PointersTo(gradient.ranks), elements, block_squares, finite, stream);
}
void GradientSquares(const Float32Partials& gradient, int64_t elements, double* block_squares,
                     int32_t* finite, cudaStream_t stream) {
  Squares(PointersTo(gradient.ranks), elements, block_squares, finite, stream);
}
void GradientSquares(const RoundedPartials& gradient, int64_t elements, double* block_squares,
                     int32_t* finite, cudaStream_t stream) {
  Squares(PointersTo<true>(gradient.ranks), elements, block_squares, finite, stream);
}

void AddSquaresInOrder(const double* block_squares, int64_t blocks, double* sum,
                       cudaStream_t stream) {
  OOM_CHECK(blocks >= 0);
  if (blocks == 0) return;
  AddSquaresInOrderKernel<<<1, kThreads, 0, stream>>>(block_squares, blocks, sum);
  CheckLaunch("AddSquaresInOrder");
}

}  // namespace oom
