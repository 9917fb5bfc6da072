// The update and the norm, written once over a Lanes type; adamw_scalar.cc, adamw_avx2.cc and
// adamw_avx512.cc each include this with their own. Internal: include it from those three only.
// A Lanes type has kWidth and the types F (kWidth floats) and SquareSum, and these operations, each
// correctly rounded on every lane:
//   Broadcast, Load(float), Store(float), LoadBfloat16, Add, Multiply, Fma(a, b, c), NegativeFma
//   (-a*b + c), Divide, SquareRoot; ZeroIfSmall(x, bits): +0 where the bits of |x| are below bits;
//   ZeroIfLess(x, y): +0 where x < y (a NaN is not); AnyNan;
//   CanonicalNan: a NaN of any sign and payload becomes 0x7FC00000;
//   LoadMaster, StoreMaster: join and split of (weight, weight_low).
// Everything has internal linkage and calls nothing of the standard library (see adamw_kernels.h).

#pragma once

#ifdef __FAST_MATH__
#error "The update is a defined sequence of roundings; fast-math would change it."
#endif

#include "runtime/optim/adamw_kernels.h"

namespace oom::internal {
namespace {

constexpr uint32_t kCanonicalNanBits = 0x7FC00000u;
constexpr int32_t kSmallestNormalBits = 0x00800000;           // 2^-126
constexpr int32_t kGradientThresholdBits = (127 - 56) << 23;  // 2^-56
constexpr int32_t kMomentThresholdBits = (127 - 100) << 23;   // 2^-100

#define OOM_LANES_INLINE inline __attribute__((always_inline))

template <class Lanes>
struct Step {
  using F = typename Lanes::F;

  explicit OOM_LANES_INLINE Step(const AdamWScalars& scalars)
      : beta1(Lanes::Broadcast(scalars.beta1)),
        one_minus_beta1(Lanes::Broadcast(scalars.one_minus_beta1)),
        beta2(Lanes::Broadcast(scalars.beta2)),
        one_minus_beta2(Lanes::Broadcast(scalars.one_minus_beta2)),
        decay(Lanes::Broadcast(scalars.decay)),
        step_size(Lanes::Broadcast(scalars.step_size)),
        second_correction(Lanes::Broadcast(scalars.second_correction)),
        epsilon(Lanes::Broadcast(scalars.epsilon)),
        clip(Lanes::Broadcast(scalars.clip)),
        moment_threshold(Lanes::Broadcast(0x1p-100f)),
        clips(scalars.clip != 1.0f) {}

  OOM_LANES_INLINE F Gradient(F g) const {
    if (clips) {
      // A denormal times k is below the threshold too (k < 2^70), and slows the multiplication.
      g = Lanes::Multiply(Lanes::ZeroIfSmall(g, kSmallestNormalBits), clip);
    }
    return Lanes::ZeroIfSmall(g, kGradientThresholdBits);
  }
  // A denormal moment, which only imported state can hold, slows the FMA. Taken as zero it gives
  // the same bits: what it adds to is either below the threshold, so that the result is zero both
  // ways, or at least 2^-100, where 2^-126 is less than a quarter of the last place.
  OOM_LANES_INLINE F Moment1(F m, F g) const {
    m = Lanes::ZeroIfSmall(m, kSmallestNormalBits);
    m = Lanes::Fma(beta1, m, Lanes::Multiply(one_minus_beta1, g));
    return Lanes::ZeroIfSmall(m, kMomentThresholdBits);
  }
  OOM_LANES_INLINE F Moment2(F v, F g) const {
    v = Lanes::ZeroIfSmall(v, kSmallestNormalBits);
    v = Lanes::Fma(beta2, v, Lanes::Multiply(one_minus_beta2, Lanes::Multiply(g, g)));
    return Lanes::ZeroIfLess(v, moment_threshold);
  }
  OOM_LANES_INLINE F Weight(F w, F m, F v) const {
    const F denominator = Lanes::Fma(Lanes::SquareRoot(v), second_correction, epsilon);
    return Lanes::NegativeFma(step_size, Lanes::Divide(m, denominator), Lanes::Multiply(decay, w));
  }

  F beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, second_correction, epsilon,
      clip;
  F moment_threshold;
  bool clips;
};

OOM_LANES_INLINE bool KeepsWeights(const AdamWScalars& scalars) {
  // The formula would turn a weight of -0.0 into +0.0 where moment1 is negative.
  return scalars.step_size == 0.0f && scalars.decay == 1.0f;
}

template <class Lanes>
OOM_LANES_INLINE typename Lanes::F LoadGradient(const uint16_t* values) {
  return Lanes::LoadBfloat16(values);
}
template <class Lanes>
OOM_LANES_INLINE typename Lanes::F LoadGradient(const float* values) {
  return Lanes::Load(values);
}

// How far ahead the loops prefetch: 3 KiB of each moment. Divisions and square roots fill the
// reorder window, so the CPU's own look-ahead hides too little of DRAM. Measured on one core (Zen
// 5): 0.80 of the speed of a prefetching copy without it, 0.93 at 256 elements, 1.0 from 512 to
// 1,024.
constexpr int64_t kPrefetchElements = 768;

// The partials of all ranks added in rank order.
template <class Lanes, bool kOneRank, class T>
OOM_LANES_INLINE typename Lanes::F SumPartials(const PartialsView<T>& view, const T* rank0,
                                               int64_t i) {
  typename Lanes::F sum = LoadGradient<Lanes>(rank0 + i);
  if constexpr (!kOneRank) {
    for (int64_t rank = 1; rank < view.rank_count; ++rank) {
      const T* const from = view.ranks[rank] + view.first + i;
      if constexpr (Lanes::kWidth > 1) __builtin_prefetch(from + kPrefetchElements);
      sum = Lanes::Add(sum, LoadGradient<Lanes>(from));
    }
  }
  return sum;
}

template <class Lanes>
OOM_LANES_INLINE typename Lanes::F LoadWeight(const SplitRun& run, int64_t i) {
  return Lanes::LoadMaster(run.weight + i, run.weight_low + i);
}
template <class Lanes>
OOM_LANES_INLINE typename Lanes::F LoadWeight(const MasterRun& run, int64_t i) {
  return Lanes::Load(run.master + i);
}
template <class Lanes>
OOM_LANES_INLINE void StoreWeight(const SplitRun& run, int64_t i, typename Lanes::F w) {
  Lanes::StoreMaster(w, run.weight + i, run.weight_low + i);
}
template <class Lanes>
OOM_LANES_INLINE void StoreWeight(const MasterRun& run, int64_t i, typename Lanes::F w) {
  Lanes::Store(run.master + i, w);
}

// The arrays of a block continue in the next one, after the block's other arrays. A prefetch past
// the last block is harmless: it cannot fault.
template <class Element>
OOM_LANES_INLINE void PrefetchInBlock(const Element* array, int64_t i, int64_t left_in_block,
                                      int64_t block_bytes) {
  constexpr int64_t kArrayBytes = kAdamWBlockElements * sizeof(Element);
  const int64_t ahead = i + kPrefetchElements;
  const int64_t jump_bytes = ahead >= left_in_block ? block_bytes - kArrayBytes : 0;
  __builtin_prefetch(reinterpret_cast<const char*>(array + ahead) + jump_bytes);
}
OOM_LANES_INLINE void PrefetchState(const SplitRun& run, int64_t i) {
  PrefetchInBlock(run.moment1, i, run.left_in_block, kSplitRestBytesPerBlock);
  PrefetchInBlock(run.moment2, i, run.left_in_block, kSplitRestBytesPerBlock);
  PrefetchInBlock(run.weight_low, i, run.left_in_block, kSplitRestBytesPerBlock);
  __builtin_prefetch(run.weight + i + kPrefetchElements);
}
OOM_LANES_INLINE void PrefetchState(const MasterRun& run, int64_t i) {
  PrefetchInBlock(run.moment1, i, run.left_in_block, kMasterRestBytesPerBlock);
  PrefetchInBlock(run.moment2, i, run.left_in_block, kMasterRestBytesPerBlock);
  __builtin_prefetch(run.master + i + kPrefetchElements);
}

template <class Lanes, bool kOneRank, bool kKeepWeights, class T, class Run>
void UpdateLoop(const AdamWScalars& scalars, const PartialsView<T>& view, const Run& shared_run) {
  using F = typename Lanes::F;
  const Step<Lanes> step(scalars);
  const Run run = shared_run;  // A local copy: the stores below cannot change it.
  const T* const rank0 = view.ranks[0] + view.first;
  for (int64_t i = 0; i < run.elements; i += Lanes::kWidth) {
    if constexpr (Lanes::kWidth > 1) {
      PrefetchState(run, i);
      __builtin_prefetch(rank0 + i + kPrefetchElements);
    }
    const F g = step.Gradient(SumPartials<Lanes, kOneRank>(view, rank0, i));
    F m = step.Moment1(Lanes::Load(run.moment1 + i), g);
    F v = step.Moment2(Lanes::Load(run.moment2 + i), g);
    if constexpr (kKeepWeights) {
      m = Lanes::CanonicalNan(m);
      v = Lanes::CanonicalNan(v);
    } else {
      F w = step.Weight(LoadWeight<Lanes>(run, i), m, v);
      if (__builtin_expect(Lanes::AnyNan(w), 0)) {  // A NaN moment makes the weight one.
        m = Lanes::CanonicalNan(m);
        v = Lanes::CanonicalNan(v);
        w = Lanes::CanonicalNan(w);
      }
      StoreWeight<Lanes>(run, i, w);
    }
    Lanes::Store(run.moment1 + i, m);
    Lanes::Store(run.moment2 + i, v);
  }
}

template <class Lanes, class T, class Run>
void UpdateRun(const AdamWScalars& scalars, const PartialsView<T>& view, const Run& run) {
  if (KeepsWeights(scalars)) {
    UpdateLoop<Lanes, false, true>(scalars, view, run);
  } else if (view.rank_count == 1) {
    UpdateLoop<Lanes, true, false>(scalars, view, run);
  } else {
    UpdateLoop<Lanes, false, false>(scalars, view, run);
  }
}

template <class Lanes, bool kOneRank, class T>
void SquaresLoop(const PartialsView<T>& view, double* lanes) {
  typename Lanes::SquareSum sum;
  const T* const rank0 = view.ranks[0] + view.first;
  for (int64_t i = 0; i < kAdamWBlockElements; i += Lanes::kWidth) {
    if constexpr (Lanes::kWidth > 1) __builtin_prefetch(rank0 + i + kPrefetchElements);
    sum.Add(SumPartials<Lanes, kOneRank>(view, rank0, i), i);
  }
  sum.Store(lanes);
}

template <class Lanes, class T>
void SquaresOfBlock(const PartialsView<T>& view, double* lanes) {
  if (view.rank_count == 1) {
    SquaresLoop<Lanes, true>(view, lanes);
  } else {
    SquaresLoop<Lanes, false>(view, lanes);
  }
}

template <class Lanes>
constexpr AdamWKernels MakeKernels() {
  return {.bfloat16_into_split = UpdateRun<Lanes, uint16_t, SplitRun>,
          .float32_into_split = UpdateRun<Lanes, float, SplitRun>,
          .float32_into_master = UpdateRun<Lanes, float, MasterRun>,
          .bfloat16_squares = SquaresOfBlock<Lanes, uint16_t>,
          .float32_squares = SquaresOfBlock<Lanes, float>};
}

}  // namespace
}  // namespace oom::internal
