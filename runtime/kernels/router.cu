#include "runtime/base/check.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/router.h"
#include "runtime/kernels/router_experts.cuh"
#include "runtime/kernels/router_keys.cuh"

namespace oom {
namespace {

constexpr int kMostChoices = 16;
constexpr int kMostExperts = 512;

// The largest keys of a token, falling: lane l keeps choices l, l + kLanes, ... and 0 beyond the
// last choice. Uses the lane's keys up.
template <int kLanes, class Key, int kValues, int kSlots>
__device__ void ChooseKeys(Key (&key)[kValues], int choices, Key (&chosen)[kSlots]) {
  const int lane = threadIdx.x % kLanes;
  SortKeys(key);
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    chosen[slot] = 0;
    for (int owner = 0; owner < kLanes && slot * kLanes + owner < choices; ++owner) {
      const Key most = GroupMax<kLanes>(key[0]);
      if (lane == owner) chosen[slot] = most;
      if (key[0] == most) {
#pragma unroll
        for (int v = 0; v + 1 < kValues; ++v) key[v] = key[v + 1];
        key[kValues - 1] = 0;
      }
    }
  }
}

template <class Experts, class T>
__global__ void __launch_bounds__(kRouterThreads, 4)
    ForwardKernel(RouterShape shape, const T* __restrict__ logits_TE, RouterChoice choice,
                  bool whole) {
  constexpr int kLanes = Experts::kLanes;
  constexpr int kValues = Experts::kValues;
  using Key = RouterKey<T>;
  constexpr int kSlots = (kMostChoices + kLanes - 1) / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  const int first = lane * kValues;
  const int experts = shape.expert_count;
  const int choices = shape.experts_per_token;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * Experts::kTokens;

  float probability_sum[kValues] = {};
  for (int i = 0; i < Experts::kTokens; i += Experts::kGroups) {
    if (first_token + i >= shape.token_count) break;
    // A group beyond the last token repeats that one and writes nothing: shuffles need every lane.
    const bool valid = first_token + i + group < shape.token_count;
    const int64_t token = valid ? first_token + i + group : shape.token_count - 1;
    float value[kValues];
    LoadExperts<kValues>(logits_TE + token * experts, first, experts, whole, -INFINITY, value);
    Key key[kValues];
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      key[v] = first + v < experts ? KeyOf<T>(value[v], first + v) : Key{0};
    }
    const Softmax softmax = Exponentials<kLanes>(value);
    if (choice.probability_BE != nullptr && valid) {
      const float reciprocal = 1.0f / softmax.sum;
#pragma unroll
      for (int v = 0; v < kValues; ++v) probability_sum[v] += value[v] * reciprocal;
    }

    Key chosen[kSlots];
    ChooseKeys<kLanes>(key, choices, chosen);
    float weight[kSlots];
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      weight[slot] = chosen[slot] == 0 ? 0.0f : softmax.Probability(LogitOf<T>(chosen[slot]));
      sum += weight[slot];
    }
    sum = GroupSum<kLanes>(sum);
    if (!valid) continue;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int k = slot * kLanes + lane;
      if (k >= choices) break;
      const float w = shape.renormalize ? __fdiv_rn(weight[slot], sum) : weight[slot];
      choice.expert_TK[token * choices + k] = ExpertOf(chosen[slot]);
      choice.weight_TK[token * choices + k] = w;
      if (choice.applied_TK != nullptr) {
        choice.applied_TK[token * choices + k] = shape.round_weights ? ToFloat(RoundTo<T>(w)) : w;
      }
    }
  }

  if (choice.probability_BE == nullptr) return;
  __shared__ float sums[Experts::kGroups][kLanes * kValues];
#pragma unroll
  for (int v = 0; v < kValues; ++v) sums[group][first + v] = probability_sum[v];
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kRouterThreads) {
    double sum = 0.0;
    for (int g = 0; g < Experts::kGroups; ++g) sum += sums[g][e];
    choice.probability_BE[static_cast<int64_t>(blockIdx.x) * experts + e] = sum;
  }
}

template <class Experts, class T, class Gradient>
__global__ void __launch_bounds__(kRouterThreads)
    BackwardKernel(RouterShape shape, const T* __restrict__ logits_TE, RouterBackwardInput input,
                   float balance_scale, Gradient* dlogits_TE, bool whole) {
  constexpr int kLanes = Experts::kLanes;
  constexpr int kValues = Experts::kValues;
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  const int first = lane * kValues;
  const int experts = shape.expert_count;
  const int choices = shape.experts_per_token;
  const bool balanced = input.balance.fraction_E != nullptr;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * Experts::kTokens;

  float fraction[kValues] = {};
  if (balanced) {
    LoadExperts<kValues>(input.balance.fraction_E, first, experts, /*whole=*/false, 0.0f, fraction);
  }
  for (int i = 0; i < Experts::kTokens; i += Experts::kGroups) {
    if (first_token + i >= shape.token_count) break;
    const bool valid = first_token + i + group < shape.token_count;
    const int64_t token = valid ? first_token + i + group : shape.token_count - 1;
    const bool dense = balanced || !shape.renormalize;
    float probability[kValues] = {};
    Softmax softmax = {};
    if (dense) {
      LoadExperts<kValues>(logits_TE + token * experts, first, experts, whole, -INFINITY,
                           probability);
      softmax = Exponentials<kLanes>(probability);
      const float reciprocal = 1.0f / softmax.sum;
#pragma unroll
      for (int v = 0; v < kValues; ++v) probability[v] *= reciprocal;
    }
    float mean = 0.0f;
    for (int k = lane; k < choices; k += kLanes) {
      mean += input.weight_TK[token * choices + k] * input.dweight_TK[token * choices + k];
    }
    mean = GroupSum<kLanes>(mean);
    float fraction_mean = 0.0f;
    if (balanced) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        if (first + v < experts) fraction_mean += probability[v] * fraction[v];
      }
      fraction_mean = GroupSum<kLanes>(fraction_mean);
    }

    // First every expert as if it were not chosen, then the chosen ones, whose w is p where it is
    // not renormalised.
    float gradient[kValues] = {};
    if (dense) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        gradient[v] = balance_scale * probability[v] * (fraction[v] - fraction_mean);
        if (!shape.renormalize) gradient[v] -= mean * probability[v];
      }
    }
    if (valid) StoreExperts(dlogits_TE + token * experts, first, experts, whole, gradient);
    __syncwarp();
    for (int k = lane; valid && k < choices; k += kLanes) {
      const int expert = input.expert_TK[token * choices + k];
      float value =
          (input.dweight_TK[token * choices + k] - mean) * input.weight_TK[token * choices + k];
      if (balanced) {
        value += balance_scale * softmax.Probability(ToFloat(logits_TE[token * experts + expert])) *
                 (input.balance.fraction_E[expert] - fraction_mean);
      }
      dlogits_TE[token * experts + expert] = RoundTo<Gradient>(value);
    }
  }
}

// One block of 32 x 32 threads for 32 experts: each row of threads adds up a run of blocks, then
// the runs are added in order.
__global__ void StatsKernel(int experts, int64_t blocks, const double* __restrict__ probability_BE,
                            const int32_t* __restrict__ first_row_E1, int64_t* count_E,
                            double* probability_E) {
  __shared__ double sums[32][32];
  const int expert = blockIdx.x * 32 + threadIdx.x;
  const int64_t run = (blocks + 31) / 32;
  double sum = 0.0;
  if (expert < experts) {
    const int64_t last = min(blocks, (threadIdx.y + 1) * run);
    for (int64_t b = threadIdx.y * run; b < last; ++b) sum += probability_BE[b * experts + expert];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || expert >= experts) return;
  for (int y = 1; y < 32; ++y) sum += sums[y][threadIdx.x];
  probability_E[expert] += sum;
  count_E[expert] += first_row_E1[expert + 1] - first_row_E1[expert];
}

__global__ void FractionKernel(const int64_t* __restrict__ count_E, int64_t experts, int64_t tokens,
                               float* fraction_E) {
  const int64_t expert = static_cast<int64_t>(blockIdx.x) * kRouterThreads + threadIdx.x;
  if (expert >= experts) return;
  fraction_E[expert] = __fdiv_rn(static_cast<float>(count_E[expert]), static_cast<float>(tokens));
}

void CheckShape(const RouterShape& shape) {
  OOM_CHECK(shape.token_count >= 0);
  OOM_CHECK(shape.expert_count > 0 && shape.expert_count <= kMostExperts);
  OOM_CHECK(shape.experts_per_token > 0 && shape.experts_per_token <= kMostChoices);
  OOM_CHECK(shape.experts_per_token <= shape.expert_count);
}

template <class T>
void Forward(const RouterShape& shape, const T* logits_TE, const RouterChoice& choice,
             cudaStream_t stream) {
  CheckShape(shape);
  if (shape.token_count == 0) return;
  const bool whole = shape.expert_count % 8 == 0 && WholeVectors(16, logits_TE);
  const unsigned blocks = static_cast<unsigned>(RouterBlocks(shape));
  WithRouterLayout(shape.expert_count, [&](auto layout) {
    ForwardKernel<decltype(layout)>
        <<<blocks, kRouterThreads, 0, stream>>>(shape, logits_TE, choice, whole);
  });
  CheckLaunch("RouterForward");
}

template <class T, class Gradient>
void Backward(const RouterShape& shape, const T* logits_TE, const RouterBackwardInput& input,
              Gradient* dlogits_TE, cudaStream_t stream) {
  CheckShape(shape);
  if (shape.token_count == 0) return;
  const bool whole = shape.expert_count % 8 == 0 && WholeVectors(16, logits_TE, dlogits_TE);
  const unsigned blocks = static_cast<unsigned>(RouterBlocks(shape));
  WithRouterLayout(shape.expert_count, [&](auto layout) {
    BackwardKernel<decltype(layout)><<<blocks, kRouterThreads, 0, stream>>>(
        shape, logits_TE, input, static_cast<float>(input.balance.scale), dlogits_TE, whole);
  });
  CheckLaunch("RouterBackward");
}

}  // namespace

int64_t RouterBlocks(const RouterShape& shape) {
  int64_t blocks = 0;
  WithRouterLayout(shape.expert_count, [&](auto layout) {
    blocks = (shape.token_count + decltype(layout)::kTokens - 1) / decltype(layout)::kTokens;
  });
  return blocks;
}

void RouterForward(const RouterShape& shape, const __nv_bfloat16* logits_TE,
                   const RouterChoice& choice, cudaStream_t stream) {
  Forward(shape, logits_TE, choice, stream);
}

void RouterForward(const RouterShape& shape, const float* logits_TE, const RouterChoice& choice,
                   cudaStream_t stream) {
  Forward(shape, logits_TE, choice, stream);
}

void AddRouterStats(const RouterShape& shape, const double* probability_BE,
                    const int32_t* first_row_E1, int64_t* count_E, double* probability_E,
                    cudaStream_t stream) {
  CheckShape(shape);
  if (shape.token_count == 0) return;
  StatsKernel<<<(shape.expert_count + 31) / 32, dim3(32, 32), 0, stream>>>(
      shape.expert_count, RouterBlocks(shape), probability_BE, first_row_E1, count_E,
      probability_E);
  CheckLaunch("AddRouterStats");
}

void LoadBalanceFraction(const int64_t* count_E, int64_t expert_count, int64_t token_count,
                         float* fraction_E, cudaStream_t stream) {
  OOM_CHECK(expert_count > 0 && token_count > 0);
  const unsigned blocks =
      static_cast<unsigned>((expert_count + kRouterThreads - 1) / kRouterThreads);
  FractionKernel<<<blocks, kRouterThreads, 0, stream>>>(count_E, expert_count, token_count,
                                                        fraction_E);
  CheckLaunch("LoadBalanceFraction");
}

void RouterBackward(const RouterShape& shape, const __nv_bfloat16* logits_TE,
                    const RouterBackwardInput& input, float* dlogits_TE, cudaStream_t stream) {
  Backward(shape, logits_TE, input, dlogits_TE, stream);
}

void RouterBackward(const RouterShape& shape, const __nv_bfloat16* logits_TE,
                    const RouterBackwardInput& input, __nv_bfloat16* dlogits_TE,
                    cudaStream_t stream) {
  Backward(shape, logits_TE, input, dlogits_TE, stream);
}

void RouterBackward(const RouterShape& shape, const float* logits_TE,
                    const RouterBackwardInput& input, float* dlogits_TE, cudaStream_t stream) {
  Backward(shape, logits_TE, input, dlogits_TE, stream);
}

}  // namespace oom
