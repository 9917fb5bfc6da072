#include <algorithm>
#include <limits>

#include "runtime/kernels/launch.h"
#include "runtime/kernels/packed.cuh"
#include "runtime/kernels/partial_rows.h"
#include "runtime/kernels/rotary.h"

namespace oom {
namespace {

using internal::Difference;
using internal::DivideUp;
using internal::Forget;
using internal::kPackedCount;
using internal::Load;
using internal::Pack;
using internal::Packed;
using internal::Product;
using internal::RoundedTo;
using internal::Store;
using internal::Sum;
using internal::SumOverLanes;
using internal::WholeVectors;

constexpr int kThreads = 256;

template <class T, class Position>
__global__ void FillRotaryTableKernel(RotaryTableArguments<T> a, const Position* positions_T) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t half = a.head_size / 2;
  if (index >= a.tokens * half) return;
  const int64_t token = index / half;
  const int64_t pair = index % half;
  const float exponent = static_cast<float>(2 * pair) / static_cast<float>(a.head_size);
  const float power = powf(static_cast<float>(a.theta), exponent);
  float frequency = 1.0f / power;
  if (a.factor > 0.0f) {
    const float ramp = (static_cast<float>(pair) - a.ramp_low) / a.ramp_width;
    const float fast = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
    // Not fused: the products are rounded as in the composite.
    frequency =
        __fadd_rn(__fmul_rn(1.0f / (a.factor * power), 1.0f - fast), __fmul_rn(frequency, fast));
  }
  const float angle = static_cast<float>(positions_T[token]) * frequency;
  a.cosine[index] = RoundedTo<T>(cosf(angle) * a.attention_factor);
  a.sine[index] = RoundedTo<T>(sinf(angle) * a.attention_factor);
}

// What all lanes of a head agree on: kLanes lanes hold a head, each kPackedCount pairs of it, so
// that no element has to travel. A block walks the heads of its tokens, as many at once as it has
// groups.
template <class T, int kLanes>
struct HeadPlace {
  static constexpr int kCount = kPackedCount<T>;
  static constexpr int kGroups = kThreads / kLanes;

  __device__ HeadPlace(const RotaryShape& shape, int64_t tokens_per_block)
      : first_token(blockIdx.x * tokens_per_block),
        items(
            static_cast<unsigned>(min(tokens_per_block, shape.tokens - first_token) * shape.heads)),
        heads(static_cast<unsigned>(shape.heads)),
        half(static_cast<int>(shape.head_size / 2)),
        column(threadIdx.x % kLanes * kCount),
        group(threadIdx.x / kLanes) {}

  int64_t first_token;
  unsigned items;  // Heads of all the block's tokens.
  unsigned heads;
  int half;
  int column;
  unsigned group;
};

template <class T>
struct Pairs {
  Packed<T> first, second;
};

template <bool kWhole, class T>
__device__ Pairs<T> LoadPairs(const T* head, int column, int half, bool live = true) {
  const int left = live ? half - column : 0;
  return {.first = Load<kWhole, kPackedCount<T>>(head + column, left),
          .second = Load<kWhole, kPackedCount<T>>(head + half + column, left)};
}

// Every product and every sum is rounded to T.
template <class T>
__device__ Pairs<T> Turn(const Pairs<T>& n, const Packed<T>& cosine, const Packed<T>& sine) {
  return {.first = Difference(Product(n.first, cosine), Product(n.second, sine)),
          .second = Sum(Product(n.second, cosine), Product(n.first, sine))};
}
template <class T>
__device__ Pairs<T> TurnBack(const Pairs<T>& n, const Packed<T>& cosine, const Packed<T>& sine) {
  return {.first = Sum(Product(n.first, cosine), Product(n.second, sine)),
          .second = Difference(Product(n.second, cosine), Product(n.first, sine))};
}

template <class T>
__device__ Packed<T> Scaled(const Packed<T>& x, float factor) {
  float values[kPackedCount<T>];
#pragma unroll
  for (int i = 0; i < kPackedCount<T>; ++i) values[i] = x[i] * factor;
  return Pack<T>(values);
}

// kTurnBack is the backward without a norm.
enum class Steps { kNormAndTurn, kTurn, kTurnBack };

template <class T, int kLanes, bool kWhole, Steps kSteps>
__global__ void __launch_bounds__(kThreads)
    NormRotaryForwardKernel(RotaryShape shape, int64_t tokens_per_block,
                            NormRotaryForwardArguments<T> a) {
  using Place = HeadPlace<T, kLanes>;
  constexpr int kCount = Place::kCount;
  // Heads whose loads are in flight together; with the norm there is enough to do for one.
  constexpr int kAtOnce = kSteps == Steps::kNormAndTurn ? 1 : 2;
  const Place place(shape, tokens_per_block);
  const int column = place.column, half = place.half;
  Pairs<T> weight;
  if constexpr (kSteps == Steps::kNormAndTurn) {
    weight = LoadPairs<kWhole>(a.norm_d, column, half);
  }

  for (unsigned first = 0; first < place.items; first += kAtOnce * Place::kGroups) {
    Pairs<T> x[kAtOnce];
    Packed<T> cosine[kAtOnce], sine[kAtOnce];
    T* y[kAtOnce];
    int left[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const unsigned item = first + u * Place::kGroups + place.group;
      const bool live = item < place.items;
      const int64_t token = place.first_token + item / place.heads;
      const int64_t offset = item % place.heads * shape.head_size;
      left[u] = live ? half - column : 0;
      x[u] = LoadPairs<kWhole>(a.x_TNd + token * a.x_token_stride + offset, column, half, live);
      cosine[u] = Load<kWhole, kCount>(a.cosine + token * half + column, left[u]);
      sine[u] = Load<kWhole, kCount>(a.sine + token * half + column, left[u]);
      y[u] = a.y_TNd + token * a.y_token_stride + offset + column;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Pairs<T> turned = x[u];
      if constexpr (kSteps == Steps::kNormAndTurn) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          squares += x[u].first[i] * x[u].first[i] + x[u].second[i] * x[u].second[i];
        }
        squares = SumOverLanes<kLanes>(squares);
        const float r = rsqrtf(squares / static_cast<float>(shape.head_size) + a.epsilon);
        turned = {.first = Product(Scaled(x[u].first, r), weight.first),
                  .second = Product(Scaled(x[u].second, r), weight.second)};
      }
      turned = kSteps == Steps::kTurnBack ? TurnBack(turned, cosine[u], sine[u])
                                          : Turn(turned, cosine[u], sine[u]);
      Store<kWhole>(y[u], turned.first, left[u]);
      Store<kWhole>(y[u] + half, turned.second, left[u]);
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

template <class T, int kLanes, bool kWhole>
__global__ void __launch_bounds__(kThreads, 3)
    NormRotaryBackwardKernel(RotaryShape shape, int64_t tokens_per_block,
                             NormRotaryBackwardArguments<T> a) {
  using Place = HeadPlace<T, kLanes>;
  constexpr int kCount = Place::kCount;
  const Place place(shape, tokens_per_block);
  const int column = place.column, half = place.half;
  const float reciprocal_size = 1.0f / static_cast<float>(shape.head_size);
  const Pairs<T> weight = LoadPairs<kWhole>(a.norm_d, column, half);
  float dfirst[kCount] = {}, dsecond[kCount] = {};

  for (unsigned first = 0; first < place.items; first += Place::kGroups) {
    const unsigned item = first + place.group;
    const bool live = item < place.items;
    const int64_t token = place.first_token + item / place.heads;
    const int64_t offset = item % place.heads * shape.head_size;
    const int left = live ? half - column : 0;
    Pairs<T> x = LoadPairs<kWhole>(a.x_TNd + token * a.x_token_stride + offset, column, half, live);
    const Pairs<T> dy =
        LoadPairs<kWhole>(a.dy_TNd + token * a.dy_token_stride + offset, column, half, live);
    const Packed<T> cosine = Load<kWhole, kCount>(a.cosine + token * half + column, left);
    const Packed<T> sine = Load<kWhole, kCount>(a.sine + token * half + column, left);

    Pairs<T> dn = TurnBack(dy, cosine, sine);
    float squares = 0.0f, dot = 0.0f;  // Of x^2 and of x * dn * w.
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      squares += x.first[i] * x.first[i] + x.second[i] * x.second[i];
      dot += x.first[i] * (dn.first[i] * weight.first[i]) +
             x.second[i] * (dn.second[i] * weight.second[i]);
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
      dx1[i] = (dn.first[i] * weight.first[i] - normalized1 * mean) * r;
      dx2[i] = (dn.second[i] * weight.second[i] - normalized2 * mean) * r;
    }
    T* const dx = a.dx_TNd + token * a.dx_token_stride + offset + column;
    Store<kWhole>(dx, Pack<T>(dx1), left);
    Store<kWhole>(dx + half, Pack<T>(dx2), left);
  }

  if (a.dnorm_d == nullptr) return;
  __shared__ float by_group[Place::kGroups][2][kLanes * kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    by_group[place.group][0][column + i] = dfirst[i];
    by_group[place.group][1][column + i] = dsecond[i];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < shape.head_size; c += kThreads) {
    const int second = c >= half ? 1 : 0;
    float sum = 0.0f;
    for (int g = 0; g < Place::kGroups; ++g) sum += by_group[g][second][c - second * half];
    a.scratch[blockIdx.x * shape.head_size + c] = sum;
  }
}

void CheckShape(const RotaryShape& shape, int64_t vectors) {
  OOM_CHECK(shape.tokens >= 0 && shape.heads > 0 && shape.head_size > 0);
  OOM_CHECK(shape.head_size % 2 == 0 && vectors <= 32);
}

// Calls launch(lanes constant, whole vectors constant).
template <class Launch>
void WithLanes(int64_t vectors, bool whole, const Launch& launch) {
  using std::false_type, std::true_type;
  if (!whole) {
    launch(std::integral_constant<int, 32>{}, false_type{});
  } else if (vectors <= 8) {
    launch(std::integral_constant<int, 8>{}, true_type{});
  } else if (vectors <= 16) {
    launch(std::integral_constant<int, 16>{}, true_type{});
  } else {
    launch(std::integral_constant<int, 32>{}, true_type{});
  }
}

template <class T>
void Forward(const RotaryShape& shape, const NormRotaryForwardArguments<T>& a, bool back,
             cudaStream_t stream) {
  const int64_t half = shape.head_size / 2;
  const int64_t vectors = DivideUp(half, kPackedCount<T>);
  CheckShape(shape, vectors);
  if (shape.tokens == 0) return;
  const bool whole = WholeVectors(half * sizeof(T), a.x_TNd, a.norm_d, a.cosine, a.sine, a.y_TNd) &&
                     WholeVectors(a.x_token_stride * sizeof(T)) &&
                     WholeVectors(a.y_token_stride * sizeof(T));
  // 128 heads: two rounds of a block with eight lanes a head.
  const int64_t tokens_per_block = std::max<int64_t>(1, 128 / shape.heads);
  const auto blocks = static_cast<unsigned>(DivideUp(shape.tokens, tokens_per_block));
  WithLanes(vectors, whole, [&](auto lanes, auto whole_vectors) {
    const auto kernel =
        back ? NormRotaryForwardKernel<T, lanes(), whole_vectors(), Steps::kTurnBack>
        : a.norm_d != nullptr
            ? NormRotaryForwardKernel<T, lanes(), whole_vectors(), Steps::kNormAndTurn>
            : NormRotaryForwardKernel<T, lanes(), whole_vectors(), Steps::kTurn>;
    kernel<<<blocks, kThreads, 0, stream>>>(shape, tokens_per_block, a);
  });
  CheckLaunch("NormRotaryForward");
}

template <class T>
void Backward(const RotaryShape& shape, const NormRotaryBackwardArguments<T>& a,
              cudaStream_t stream) {
  if (a.norm_d == nullptr) {
    Forward<T>(shape,
               {.x_TNd = a.dy_TNd,
                .x_token_stride = a.dy_token_stride,
                .cosine = a.cosine,
                .sine = a.sine,
                .y_TNd = a.dx_TNd,
                .y_token_stride = a.dx_token_stride},
               /*back=*/true, stream);
    return;
  }
  const int64_t half = shape.head_size / 2;
  const int64_t vectors = DivideUp(half, kPackedCount<T>);
  CheckShape(shape, vectors);
  OOM_CHECK(a.dnorm_d == nullptr || a.scratch != nullptr);
  if (shape.tokens == 0) return;
  const bool whole =
      WholeVectors(half * sizeof(T), a.dy_TNd, a.x_TNd, a.norm_d, a.cosine, a.sine, a.dx_TNd) &&
      WholeVectors(a.x_token_stride * sizeof(T)) && WholeVectors(a.dy_token_stride * sizeof(T)) &&
      WholeVectors(a.dx_token_stride * sizeof(T));
  const int64_t tokens_per_block = DivideUp(shape.tokens, PartialRows(shape));
  OOM_CHECK(tokens_per_block * shape.heads < std::numeric_limits<int>::max());
  const int64_t blocks = DivideUp(shape.tokens, tokens_per_block);
  WithLanes(vectors, whole, [&](auto lanes, auto whole_vectors) {
    NormRotaryBackwardKernel<T, lanes(), whole_vectors()>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(shape, tokens_per_block, a);
  });
  CheckLaunch("NormRotaryBackward");
  if (a.dnorm_d == nullptr) return;
  AddPartialRows(a.scratch, blocks, shape.head_size, a.dnorm_d, stream);
}

template <class T, class Position>
void Fill(const RotaryTableArguments<T>& a, const Position* positions_T, cudaStream_t stream) {
  OOM_CHECK(a.tokens >= 0 && a.head_size > 0 && a.head_size % 2 == 0);
  if (a.tokens == 0) return;
  const int64_t blocks = DivideUp(a.tokens * (a.head_size / 2), kThreads);
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
