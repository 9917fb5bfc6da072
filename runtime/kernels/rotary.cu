#include <algorithm>
#include <limits>
#include <type_traits>

#include "runtime/kernels/launch.h"
#include "runtime/kernels/packed.cuh"
#include "runtime/kernels/partial_rows.h"
#include "runtime/kernels/rotary.h"
#include "runtime/kernels/rotary_heads.cuh"

namespace oom {
namespace {

using internal::DivideUp;
using internal::Forget;
using internal::HeadPlace;
using internal::kPackedCount;
using internal::Layout;
using internal::LoadPairs;
using internal::LoadTable;
using internal::Pack;
using internal::Packed;
using internal::Pairs;
using internal::Product;
using internal::Rotated;
using internal::RoundedTo;
using internal::Scaled;
using internal::StorePairs;
using internal::SumOverLanes;
using internal::WholeVectors;

constexpr int kThreads = internal::kHeadThreads;

template <class T, class Position>
__global__ void FillRotaryTableKernel(RotaryTableArguments<T> a, const Position* positions_T) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t pairs = a.rotary_size / 2;
  if (index >= a.tokens * pairs) return;
  const int64_t token = index / pairs;
  const int64_t pair = index % pairs;
  const float exponent = static_cast<float>(2 * pair) / static_cast<float>(a.rotary_size);
  const float power = powf(static_cast<float>(a.theta), exponent);
  float frequency = 1.0f / power;
  if (a.factor > 0.0f) {
    const float ramp = (static_cast<float>(pair) - a.ramp_low) / a.ramp_width;
    const float fast = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
    // Not fused: the products are rounded as in the composite.
    frequency =
        __fadd_rn(__fmul_rn(1.0f / (a.factor * power), 1.0f - fast), __fmul_rn(frequency, fast));
  }
  if (pair >= a.pair_count) frequency = 0.0f;
  const float angle = static_cast<float>(positions_T[token]) * frequency;
  a.cosine[index] = RoundedTo<T>(cosf(angle) * a.attention_factor);
  a.sine[index] = RoundedTo<T>(sinf(angle) * a.attention_factor);
}

// kTurnBack is the backward without a norm.
enum class Steps { kRoundedNormAndTurn, kNormAndTurn, kTurn, kTurnBack };

// Blocks that must fit a multiprocessor: without the norm there are loads to hide.
constexpr int BlocksAtLeast(Layout layout, Steps steps) {
  const bool turn_alone = steps == Steps::kTurn || steps == Steps::kTurnBack;
  return turn_alone && layout == Layout::kFull ? 5 : 1;
}

template <class T, int kLanes, Layout kLayout, Steps kSteps>
__global__ void __launch_bounds__(kThreads, BlocksAtLeast(kLayout, kSteps))
    NormRotaryForwardKernel(RotaryShape shape, int64_t tokens_per_block,
                            NormRotaryForwardArguments<T> a) {
  using Place = HeadPlace<T, kLanes, kLayout>;
  constexpr bool kNorm = kSteps == Steps::kRoundedNormAndTurn || kSteps == Steps::kNormAndTurn;
  // Heads whose loads are in flight together; with the norm there is enough to do for one.
  constexpr int kAtOnce = kNorm ? 1 : 2;
  const Place place(shape, tokens_per_block);
  Pairs<T> weight;
  if constexpr (kNorm) weight = LoadPairs(place, a.norm_d);
  const float offset = a.scale == NormScale::kOnePlusWeight ? 1.0f : 0.0f;

  for (unsigned first = 0; first < place.items; first += kAtOnce * Place::kGroups) {
    Pairs<T> x[kAtOnce];
    Packed<T> cosine[kAtOnce], sine[kAtOnce];
    T* y[kAtOnce];
    bool live[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const unsigned item = first + u * Place::kGroups + place.group;
      live[u] = item < place.items;
      const int64_t token = place.first_token + item / place.heads;
      const int64_t head = item % place.heads;
      x[u] = LoadPairs(place, a.x_TNd + token * a.x_token_stride + head * a.x_head_stride, live[u]);
      cosine[u] = LoadTable(place, a.cosine, token, live[u]);
      sine[u] = LoadTable(place, a.sine, token, live[u]);
      y[u] = a.y_TNd + token * a.y_token_stride + head * a.y_head_stride;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Pairs<T> n = x[u];
      if constexpr (kNorm) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < Place::kCount; ++i) {
          squares += x[u].first[i] * x[u].first[i] + x[u].second[i] * x[u].second[i];
        }
        squares = SumOverLanes<kLanes>(squares);
        const float r = rsqrtf(squares / static_cast<float>(shape.head_size) + a.epsilon);
        if constexpr (kSteps == Steps::kRoundedNormAndTurn) {
          n = {.first = Product(Scaled(x[u].first, r), weight.first),
               .second = Product(Scaled(x[u].second, r), weight.second)};
        } else {
          n = {.first = Scaled(x[u].first, r, offset, weight.first),
               .second = Scaled(x[u].second, r, offset, weight.second)};
        }
      }
      StorePairs(place, Rotated<kSteps == Steps::kTurnBack>(place, n, cosine[u], sine[u]), y[u],
                 live[u]);
    }
  }
}

// Blocks of the backward, and so rows of partial sums of dnorm: the order of summation follows from
// their number, and that from the heads. Six for each of 132 multiprocessors; three, as many as run
// at once, where there is little to do.
constexpr int64_t kMaxPartialRows = 792;
constexpr int64_t kFewHeads = 8;

int64_t PartialRows(const RotaryShape& shape) {
  return shape.heads <= kFewHeads ? kMaxPartialRows / 2 : kMaxPartialRows;
}

// kPlusOne: the norm's scale is 1 + w.
template <class T, int kLanes, Layout kLayout, bool kPlusOne>
__global__ void __launch_bounds__(kThreads, 3)
    NormRotaryBackwardKernel(RotaryShape shape, int64_t tokens_per_block,
                             NormRotaryBackwardArguments<T> a) {
  using Place = HeadPlace<T, kLanes, kLayout>;
  constexpr int kCount = Place::kCount;
  const Place place(shape, tokens_per_block);
  const float reciprocal_size = 1.0f / static_cast<float>(shape.head_size);
  const Pairs<T> weight = LoadPairs(place, a.norm_d);
  const auto scaled = [](float dn, float w) { return dn * (kPlusOne ? 1.0f + w : w); };
  float dfirst[kCount] = {}, dsecond[kCount] = {};

  for (unsigned first = 0; first < place.items; first += Place::kGroups) {
    const unsigned item = first + place.group;
    const bool live = item < place.items;
    const int64_t token = place.first_token + item / place.heads;
    const int64_t head = item % place.heads;
    Pairs<T> x =
        LoadPairs(place, a.x_TNd + token * a.x_token_stride + head * a.x_head_stride, live);
    const Pairs<T> dy =
        LoadPairs(place, a.dy_TNd + token * a.dy_token_stride + head * a.dy_head_stride, live);
    const Packed<T> cosine = LoadTable(place, a.cosine, token, live);
    const Packed<T> sine = LoadTable(place, a.sine, token, live);

    Pairs<T> dn = Rotated<true>(place, dy, cosine, sine);
    float squares = 0.0f, dot = 0.0f;  // Of x^2 and of x * dn * s.
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      squares += x.first[i] * x.first[i] + x.second[i] * x.second[i];
      dot += x.first[i] * scaled(dn.first[i], weight.first[i]) +
             x.second[i] * scaled(dn.second[i], weight.second[i]);
    }
    squares = SumOverLanes<kLanes>(squares);
    dot = SumOverLanes<kLanes>(dot);
    if (!live) continue;
    Forget(&x.first);
    Forget(&x.second);
    Forget(&dn.first);
    Forget(&dn.second);
    const float r = rsqrtf(squares * reciprocal_size + a.epsilon);
    const float mean = dot * r * reciprocal_size;

    float dx1[kCount], dx2[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float normalized1 = x.first[i] * r, normalized2 = x.second[i] * r;
      dfirst[i] += dn.first[i] * normalized1;
      dsecond[i] += dn.second[i] * normalized2;
      dx1[i] = (scaled(dn.first[i], weight.first[i]) - normalized1 * mean) * r;
      dx2[i] = (scaled(dn.second[i], weight.second[i]) - normalized2 * mean) * r;
    }
    StorePairs(place, {.first = Pack<T>(dx1), .second = Pack<T>(dx2)},
               a.dx_TNd + token * a.dx_token_stride + head * a.dx_head_stride, live);
  }

  if (a.dnorm_d == nullptr) return;
  __shared__ float by_group[Place::kGroups][2][kLanes * kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    by_group[place.group][0][place.column + i] = dfirst[i];
    by_group[place.group][1][place.column + i] = dsecond[i];
  }
  __syncthreads();
  for (int column = threadIdx.x; column < place.half; column += kThreads) {
    float* const partial = a.scratch + blockIdx.x * shape.head_size + place.First(column);
    float sums[2] = {0.0f, 0.0f};
    for (int g = 0; g < Place::kGroups; ++g) {
      sums[0] += by_group[g][0][column];
      sums[1] += by_group[g][1][column];
    }
    partial[0] = sums[0];
    partial[place.Gap(column)] = sums[1];
  }
}

void CheckShape(const RotaryShape& shape, int64_t vectors) {
  OOM_CHECK(shape.tokens >= 0 && shape.heads > 0 && shape.head_size > 0);
  OOM_CHECK(shape.head_size % 2 == 0 && vectors <= 32);
  OOM_CHECK(shape.rotary_size > 0 && shape.rotary_size % 2 == 0);
  OOM_CHECK(shape.rotary_size <= shape.head_size);
}

// Calls launch(lanes constant, layout constant). `whole`: strides and pointers are of vectors.
template <class T, class Launch>
void WithLanes(const RotaryShape& shape, bool whole, const Launch& launch) {
  const auto with_layout = [&](auto layout) {
    const int64_t vectors = DivideUp(shape.head_size / 2, kPackedCount<T>);
    if (vectors <= 8) {
      launch(std::integral_constant<int, 8>{}, layout);
    } else if (vectors <= 16) {
      launch(std::integral_constant<int, 16>{}, layout);
    } else {
      launch(std::integral_constant<int, 32>{}, layout);
    }
  };
  const int64_t size = sizeof(T);
  if (!whole || !WholeVectors(shape.rotary_size / 2 * size) ||
      !WholeVectors(shape.head_size / 2 * size)) {
    launch(std::integral_constant<int, 32>{}, std::integral_constant<Layout, Layout::kElements>{});
  } else if (shape.rotary_size == shape.head_size) {
    with_layout(std::integral_constant<Layout, Layout::kFull>{});
  } else {
    with_layout(std::integral_constant<Layout, Layout::kPartial>{});
  }
}

template <class... Stride>
bool WholeStrides(int64_t element_bytes, Stride... strides) {
  return (WholeVectors(strides * element_bytes) && ...);
}

int64_t HeadStride(int64_t stride, const RotaryShape& shape) {
  return stride == 0 ? shape.head_size : stride;
}

template <class T>
void Forward(const RotaryShape& shape, NormRotaryForwardArguments<T> a, bool back,
             cudaStream_t stream) {
  CheckShape(shape, DivideUp(shape.head_size / 2, kPackedCount<T>));
  if (shape.tokens == 0) return;
  a.x_head_stride = HeadStride(a.x_head_stride, shape);
  a.y_head_stride = HeadStride(a.y_head_stride, shape);
  const bool whole =
      WholeVectors(0, a.x_TNd, a.norm_d, a.cosine, a.sine, a.y_TNd) &&
      WholeStrides(sizeof(T), a.x_token_stride, a.x_head_stride, a.y_token_stride, a.y_head_stride);
  const bool round_first = a.scale == NormScale::kWeightAfterRounding;
  // 128 heads: two rounds of a block with eight lanes a head.
  const int64_t tokens_per_block = std::max<int64_t>(1, 128 / shape.heads);
  const auto blocks = static_cast<unsigned>(DivideUp(shape.tokens, tokens_per_block));
  WithLanes<T>(shape, whole, [&](auto lanes, auto layout) {
    const auto kernel =
        back                  ? NormRotaryForwardKernel<T, lanes(), layout(), Steps::kTurnBack>
        : a.norm_d == nullptr ? NormRotaryForwardKernel<T, lanes(), layout(), Steps::kTurn>
        : round_first ? NormRotaryForwardKernel<T, lanes(), layout(), Steps::kRoundedNormAndTurn>
                      : NormRotaryForwardKernel<T, lanes(), layout(), Steps::kNormAndTurn>;
    kernel<<<blocks, kThreads, 0, stream>>>(shape, tokens_per_block, a);
  });
  CheckLaunch("NormRotaryForward");
}

template <class T>
void Backward(const RotaryShape& shape, NormRotaryBackwardArguments<T> a, cudaStream_t stream) {
  if (a.norm_d == nullptr) {
    Forward<T>(shape,
               {.x_TNd = a.dy_TNd,
                .x_token_stride = a.dy_token_stride,
                .x_head_stride = a.dy_head_stride,
                .cosine = a.cosine,
                .sine = a.sine,
                .y_TNd = a.dx_TNd,
                .y_token_stride = a.dx_token_stride,
                .y_head_stride = a.dx_head_stride},
               /*back=*/true, stream);
    return;
  }
  CheckShape(shape, DivideUp(shape.head_size / 2, kPackedCount<T>));
  OOM_CHECK(a.dnorm_d == nullptr || a.scratch != nullptr);
  if (shape.tokens == 0) return;
  a.dy_head_stride = HeadStride(a.dy_head_stride, shape);
  a.x_head_stride = HeadStride(a.x_head_stride, shape);
  a.dx_head_stride = HeadStride(a.dx_head_stride, shape);
  const bool whole = WholeVectors(0, a.dy_TNd, a.x_TNd, a.norm_d, a.cosine, a.sine, a.dx_TNd) &&
                     WholeStrides(sizeof(T), a.dy_token_stride, a.dy_head_stride, a.x_token_stride,
                                  a.x_head_stride, a.dx_token_stride, a.dx_head_stride);
  const int64_t tokens_per_block = DivideUp(shape.tokens, PartialRows(shape));
  OOM_CHECK(tokens_per_block * shape.heads < std::numeric_limits<int>::max());
  const int64_t blocks = DivideUp(shape.tokens, tokens_per_block);
  WithLanes<T>(shape, whole, [&](auto lanes, auto layout) {
    const auto kernel = a.scale == NormScale::kOnePlusWeight
                            ? NormRotaryBackwardKernel<T, lanes(), layout(), true>
                            : NormRotaryBackwardKernel<T, lanes(), layout(), false>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(shape, tokens_per_block, a);
  });
  CheckLaunch("NormRotaryBackward");
  if (a.dnorm_d == nullptr) return;
  AddPartialRows(a.scratch, blocks, shape.head_size, a.dnorm_d, stream);
}

template <class T, class Position>
void Fill(const RotaryTableArguments<T>& a, const Position* positions_T, cudaStream_t stream) {
  OOM_CHECK(a.tokens >= 0 && a.rotary_size > 0 && a.rotary_size % 2 == 0);
  OOM_CHECK(a.pair_count > 0 && a.pair_count <= a.rotary_size / 2);
  if (a.tokens == 0) return;
  const int64_t blocks = DivideUp(a.tokens * (a.rotary_size / 2), kThreads);
  FillRotaryTableKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a, positions_T);
  CheckLaunch("FillRotaryTable");
}

}  // namespace

void FillRotaryTable(const RotaryTableArguments<__nv_bfloat16>& arguments,
                     const int32_t* positions_T, cudaStream_t stream) {
  Fill(arguments, positions_T, stream);
}
void FillRotaryTable(const RotaryTableArguments<__nv_bfloat16>& arguments,
                     const int64_t* positions_T, cudaStream_t stream) {
  Fill(arguments, positions_T, stream);
}
void FillRotaryTable(const RotaryTableArguments<float>& arguments, const int32_t* positions_T,
                     cudaStream_t stream) {
  Fill(arguments, positions_T, stream);
}
void FillRotaryTable(const RotaryTableArguments<float>& arguments, const int64_t* positions_T,
                     cudaStream_t stream) {
  Fill(arguments, positions_T, stream);
}

void NormRotaryForward(const RotaryShape& shape,
                       const NormRotaryForwardArguments<__nv_bfloat16>& arguments,
                       cudaStream_t stream) {
  Forward(shape, arguments, /*back=*/false, stream);
}
void NormRotaryForward(const RotaryShape& shape, const NormRotaryForwardArguments<float>& arguments,
                       cudaStream_t stream) {
  Forward(shape, arguments, /*back=*/false, stream);
}

int64_t NormRotaryBackwardScratchBytes(const RotaryShape& shape) {
  return PartialRows(shape) * shape.head_size * static_cast<int64_t>(sizeof(float));
}

void NormRotaryBackward(const RotaryShape& shape,
                        const NormRotaryBackwardArguments<__nv_bfloat16>& arguments,
                        cudaStream_t stream) {
  Backward(shape, arguments, stream);
}
void NormRotaryBackward(const RotaryShape& shape,
                        const NormRotaryBackwardArguments<float>& arguments, cudaStream_t stream) {
  Backward(shape, arguments, stream);
}

}  // namespace oom
