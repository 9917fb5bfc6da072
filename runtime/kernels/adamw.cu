#include "runtime/kernels/adamw.h"
#include "runtime/kernels/gradient_partials.cuh"
#include "runtime/kernels/launch.h"

namespace oom {
namespace {

using internal::kBlockElements;
using internal::Load;
using internal::Packed;
using internal::PartialPointers;
using internal::PointersTo;
using internal::Store;
using internal::SumPartials;

constexpr int kThreads = 256;
constexpr int kCount = 4;  // Neighbours: 16 bytes of a moment, 8 of a weight.
constexpr int kPartElements = kThreads * kCount;
constexpr int kPartsOfBlock = kBlockElements / kPartElements;

constexpr int kSmallestNormalBits = 0x00800000;           // 2^-126
constexpr int kGradientThresholdBits = (127 - 56) << 23;  // 2^-56
constexpr int kMomentThresholdBits = (127 - 100) << 23;   // 2^-100

__device__ float ZeroIfSmall(float x, int bits) {
  return (__float_as_int(x) & 0x7FFFFFFF) < bits ? 0.0f : x;
}

__device__ float CanonicalNan(float x) {
  const bool nan = (__float_as_uint(x) & 0x7FFFFFFFu) > 0x7F800000u;
  return nan ? __uint_as_float(0x7FC00000u) : x;
}

// One parameter. The intrinsics round each operation to nearest and are never contracted.
struct Step {
  __device__ float Gradient(float g) const {
    if (clip != 1.0f) g = __fmul_rn(ZeroIfSmall(g, kSmallestNormalBits), clip);
    return ZeroIfSmall(g, kGradientThresholdBits);
  }
  __device__ float Moment1(float m, float g) const {
    m = ZeroIfSmall(m, kSmallestNormalBits);
    m = __fmaf_rn(scalars.beta1, m, __fmul_rn(scalars.one_minus_beta1, g));
    return ZeroIfSmall(m, kMomentThresholdBits);
  }
  __device__ float Moment2(float v, float g) const {
    v = ZeroIfSmall(v, kSmallestNormalBits);
    v = __fmaf_rn(scalars.beta2, v, __fmul_rn(scalars.one_minus_beta2, __fmul_rn(g, g)));
    return v < __int_as_float(kMomentThresholdBits) ? 0.0f : v;
  }
  __device__ float Weight(float w, float m, float v) const {
    const float denominator = __fmaf_rn(__fsqrt_rn(v), scalars.second_correction, scalars.epsilon);
    return __fmaf_rn(-scalars.step_size, __fdiv_rn(m, denominator), __fmul_rn(decay, w));
  }

  const AdamWScalars& scalars;
  float decay;
  float clip;
};

// Four neighbouring masters, joined as they are read and split as they are written.
struct SplitWeights {
  static constexpr int64_t kRestBytes = kSplitRestBytesPerBlock;

  __device__ SplitWeights(const SplitState& state, int64_t block, int in_block)
      : high(state.weight + block * kBlockElements + in_block),
        low(reinterpret_cast<uint16_t*>(state.rest + block * kRestBytes +
                                        kMasterRestBytesPerBlock) +
            in_block) {
    const auto upper = Load<true, kCount>(high, kCount);
    const auto lower = Load<true, kCount>(low, kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t high_bits =
          i % 2 == 0 ? upper.words[i / 2] << 16 : upper.words[i / 2] & 0xFFFF0000u;
      const int low_bits = i % 2 == 0 ? static_cast<int>(lower.words[i / 2] << 16) >> 16
                                      : static_cast<int>(lower.words[i / 2]) >> 16;
      values[i] = __uint_as_float(high_bits + static_cast<uint32_t>(low_bits));
    }
  }
  __device__ void Write() const {
    Packed<uint16_t, kCount> upper, lower;
#pragma unroll
    for (int word = 0; word < kCount / 2; ++word) {
      const uint32_t first = __float_as_uint(values[2 * word]);
      const uint32_t second = __float_as_uint(values[2 * word + 1]);
      upper.words[word] = (first + 0x8000u) >> 16 | ((second + 0x8000u) & 0xFFFF0000u);
      lower.words[word] = (first & 0xFFFFu) | second << 16;
    }
    Store<true>(high, upper, kCount);
    Store<true>(low, lower, kCount);
  }

  uint16_t* high;
  uint16_t* low;
  float values[kCount];
};

struct MasterWeights {
  static constexpr int64_t kRestBytes = kMasterRestBytesPerBlock;

  __device__ MasterWeights(const MasterState& state, int64_t block, int in_block)
      : master(state.master + block * kBlockElements + in_block) {
    const auto packed = Load<true, kCount>(master, kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = packed[i];
  }
  __device__ void Write() const { Store<true>(master, internal::Pack<float>(values), kCount); }

  float* master;
  float values[kCount];
};

template <class Weights, class State, class Element, bool kRounds>
__global__ void __launch_bounds__(kThreads)
    AdamWKernel(DeviceAdamWOptions options, PartialPointers<Element, kRounds> partials,
                State state) {
  const int64_t block = blockIdx.x / kPartsOfBlock;
  const int in_block =
      static_cast<int>(blockIdx.x % kPartsOfBlock) * kPartElements + threadIdx.x * kCount;
  float* const moment1 =
      reinterpret_cast<float*>(state.rest + block * Weights::kRestBytes) + in_block;
  float* const moment2 = moment1 + kBlockElements;
  const bool decayed = options.decayed_blocks == nullptr || options.decayed_blocks[block] != 0;
  const Step step{.scalars = options.scalars,
                  .decay = decayed ? options.scalars.decay : 1.0f,
                  .clip = options.clip == nullptr ? options.scalars.clip : *options.clip};
  // The formula would turn a weight of -0.0 into +0.0 where moment1 is negative.
  const bool keeps_weights = options.scalars.step_size == 0.0f && step.decay == 1.0f;

  Packed<float, kCount> m = Load<true, kCount>(moment1, kCount);
  Packed<float, kCount> v = Load<true, kCount>(moment2, kCount);
  Weights weights(state, block, in_block);
  float g[kCount];
  SumPartials(partials, block * kBlockElements + in_block, g);

#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float gradient = step.Gradient(g[i]);
    const float m_new = step.Moment1(m[i], gradient);
    const float v_new = step.Moment2(v[i], gradient);
    weights.values[i] = CanonicalNan(step.Weight(weights.values[i], m_new, v_new));
    m.words[i] = __float_as_uint(CanonicalNan(m_new));
    v.words[i] = __float_as_uint(CanonicalNan(v_new));
  }
  Store<true>(moment1, m, kCount);
  Store<true>(moment2, v, kCount);
  if (!keeps_weights) weights.Write();
}

template <class Weights, class State, class Element, bool kRounds>
void Update(const DeviceAdamWOptions& options, const PartialPointers<Element, kRounds>& partials,
            const State& state, const void* weight, int64_t elements, cudaStream_t stream) {
  OOM_CHECK(elements >= 0 && elements % kBlockElements == 0 && state.first_in_block == 0);
  OOM_CHECK(internal::WholeVectors(0, static_cast<const char*>(weight), state.rest));
  if (elements == 0) return;
  const int64_t blocks = elements / kPartElements;
  OOM_CHECK(blocks < int64_t{1} << 31);
  AdamWKernel<Weights>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(options, partials, state);
  CheckLaunch("AdamWUpdate");
}

}  // namespace

void AdamWUpdate(const DeviceAdamWOptions& options, const Bfloat16Partials& gradient,
                 const SplitState& state, int64_t elements, cudaStream_t stream) {
  Update<SplitWeights>(options, PointersTo(gradient.ranks), state, state.weight, elements, stream);
}
void AdamWUpdate(const DeviceAdamWOptions& options, const Float32Partials& gradient,
                 const SplitState& state, int64_t elements, cudaStream_t stream) {
  Update<SplitWeights>(options, PointersTo(gradient.ranks), state, state.weight, elements, stream);
}
void AdamWUpdate(const DeviceAdamWOptions& options, const RoundedPartials& gradient,
                 const SplitState& state, int64_t elements, cudaStream_t stream) {
  Update<SplitWeights>(options, PointersTo<true>(gradient.ranks), state, state.weight, elements,
                       stream);
}
void AdamWUpdate(const DeviceAdamWOptions& options, const Float32Partials& gradient,
                 const MasterState& state, int64_t elements, cudaStream_t stream) {
  Update<MasterWeights>(options, PointersTo(gradient.ranks), state, state.master, elements, stream);
}

}  // namespace oom
