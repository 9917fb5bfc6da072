#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/packed.cuh"
#include "runtime/kernels/token_gate.h"

namespace oom {
namespace {

using internal::DivideUp;
using internal::kPackedCount;
using internal::Load;
using internal::LogisticOf;
using internal::Pack;
using internal::Packed;
using internal::Store;
using internal::SumOverLanes;
using internal::WholeVectors;

using Element = __nv_bfloat16;
constexpr int kCount = kPackedCount<Element>;
// A warp a token.
constexpr int kThreads = 256;
constexpr int kTokensOfABlock = kThreads / 32;

struct Place {
  int64_t token;
  int lane;
};

__device__ Place PlaceOfThread() {
  return {.token = int64_t{blockIdx.x} * kTokensOfABlock + threadIdx.x / 32,
          .lane = static_cast<int>(threadIdx.x % 32)};
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads)
    TokenGateForwardKernel(TokenGateShape shape, TokenGateForwardArguments a) {
  const auto [token, lane] = PlaceOfThread();
  if (token >= shape.tokens) return;
  const float s = LogisticOf<float>(__bfloat162float(a.logit_T[token])).value;
  for (int64_t column = lane * kCount; column < shape.width; column += 32 * kCount) {
    const int64_t place = token * shape.width + column, left = shape.width - column;
    const Packed<Element> f = Load<kWhole, kCount>(a.f_TH + place, left);
    const Packed<Element> residual = Load<kWhole, kCount>(a.residual_TH + place, left);
    float y[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = residual[i] + s * f[i];
    Store<kWhole>(a.y_TH + place, Pack<Element>(y), left);
  }
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads)
    TokenGateBackwardKernel(TokenGateShape shape, TokenGateBackwardArguments a) {
  const auto [token, lane] = PlaceOfThread();
  if (token >= shape.tokens) return;
  const float s = LogisticOf<float>(__bfloat162float(a.logit_T[token])).value;
  float dot = 0.0f;
  for (int64_t column = lane * kCount; column < shape.width; column += 32 * kCount) {
    const int64_t place = token * shape.width + column, left = shape.width - column;
    const Packed<Element> dy = Load<kWhole, kCount>(a.dy_TH + place, left);
    const Packed<Element> f = Load<kWhole, kCount>(a.f_TH + place, left);
    float df[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      dot += dy[i] * f[i];
      df[i] = s * dy[i];
    }
    Store<kWhole>(a.df_TH + place, Pack<Element>(df), left);
  }
  dot = SumOverLanes<32>(dot);
  if (lane == 0) a.dlogit_T[token] = __float2bfloat16_rn(dot * s * (1.0f - s));
}

unsigned BlocksOf(const TokenGateShape& shape) {
  OOM_CHECK(shape.tokens >= 0 && shape.width > 0);
  return static_cast<unsigned>(DivideUp(shape.tokens, kTokensOfABlock));
}

}  // namespace

void TokenGateForward(const TokenGateShape& shape, const TokenGateForwardArguments& arguments,
                      cudaStream_t stream) {
  const unsigned blocks = BlocksOf(shape);
  if (blocks == 0) return;
  const bool whole = WholeVectors(shape.width * sizeof(Element), arguments.f_TH,
                                  arguments.residual_TH, arguments.y_TH);
  const auto kernel = whole ? TokenGateForwardKernel<true> : TokenGateForwardKernel<false>;
  kernel<<<blocks, kThreads, 0, stream>>>(shape, arguments);
  CheckLaunch("TokenGateForward");
}

void TokenGateBackward(const TokenGateShape& shape, const TokenGateBackwardArguments& arguments,
                       cudaStream_t stream) {
  const unsigned blocks = BlocksOf(shape);
  if (blocks == 0) return;
  const bool whole =
      WholeVectors(shape.width * sizeof(Element), arguments.dy_TH, arguments.f_TH, arguments.df_TH);
  const auto kernel = whole ? TokenGateBackwardKernel<true> : TokenGateBackwardKernel<false>;
  kernel<<<blocks, kThreads, 0, stream>>>(shape, arguments);
  CheckLaunch("TokenGateBackward");
}

}  // namespace oom
