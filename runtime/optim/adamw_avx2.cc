// The update on 16 parameters at a time with AVX2 and FMA: two registers of eight, because a full
// register of 16-bit halves needs both.

#include <immintrin.h>

#include "runtime/optim/adamw_step.h"

namespace oom::internal {
namespace {

struct Avx2Lanes {
  static constexpr int64_t kWidth = 16;
  struct F {
    __m256 a, b;
  };

#define OOM_LANE static OOM_LANES_INLINE
  OOM_LANE F Broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  OOM_LANE F Load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  OOM_LANE void Store(float* to, F x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
  }
  OOM_LANE F LoadBfloat16(const uint16_t* from) {
    return {_mm256_castsi256_ps(HighHalf(from)), _mm256_castsi256_ps(HighHalf(from + 8))};
  }
  OOM_LANE F Add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  OOM_LANE F Multiply(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  OOM_LANE F Fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  OOM_LANE F NegativeFma(F x, F y, F z) {
    return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
  }
  OOM_LANE F Divide(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  OOM_LANE F SquareRoot(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
  OOM_LANE F ZeroIfSmall(F x, int32_t bits) { return {ZeroSmall(x.a, bits), ZeroSmall(x.b, bits)}; }
  OOM_LANE F ZeroIfLess(F x, F y) {
    return {_mm256_and_ps(x.a, _mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ)),
            _mm256_and_ps(x.b, _mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ))};
  }
  OOM_LANE bool AnyNan(F x) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q),
                                           _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))) != 0;
  }
  OOM_LANE F CanonicalNan(F x) { return {Canonical(x.a), Canonical(x.b)}; }
  OOM_LANE F LoadMaster(const uint16_t* weight, const int16_t* weight_low) {
    return {Join(weight, weight_low), Join(weight + 8, weight_low + 8)};
  }
  OOM_LANE void StoreMaster(F x, uint16_t* weight, int16_t* weight_low) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    const __m256i a = _mm256_castps_si256(x.a);
    const __m256i b = _mm256_castps_si256(x.b);
    StorePacked(weight, _mm256_srli_epi32(_mm256_add_epi32(a, half), 16),
                _mm256_srli_epi32(_mm256_add_epi32(b, half), 16));
    // weight << 16 ends in 16 zeros, so the difference modulo 2^16 is the low half itself.
    StorePacked(weight_low, _mm256_and_si256(a, low), _mm256_and_si256(b, low));
  }

  struct SquareSum {
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                       _mm256_setzero_pd()};
    OOM_LANES_INLINE void Add(F x, int64_t) {
      AddFour(&sums[0], _mm256_castps256_ps128(x.a));
      AddFour(&sums[1], _mm256_extractf128_ps(x.a, 1));
      AddFour(&sums[2], _mm256_castps256_ps128(x.b));
      AddFour(&sums[3], _mm256_extractf128_ps(x.b, 1));
    }
    OOM_LANES_INLINE void Store(double* to) const {
      for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, sums[i]);
    }
    OOM_LANE void AddFour(__m256d* sum, __m128 x) {
      const __m256d wide = _mm256_cvtps_pd(x);
      *sum = _mm256_add_pd(*sum, _mm256_mul_pd(wide, wide));
    }
  };

 private:
  OOM_LANE __m256i HighHalf(const uint16_t* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
  }
  OOM_LANE __m256 Join(const uint16_t* weight, const int16_t* weight_low) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight_low));
    return _mm256_castsi256_ps(_mm256_add_epi32(HighHalf(weight), _mm256_cvtepi16_epi32(halves)));
  }
  // Values from 0 to 65,535; the pack works within 128-bit halves, the permutation restores order.
  OOM_LANE void StorePacked(void* to, __m256i a, __m256i b) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8);
    _mm256_storeu_si256(static_cast<__m256i*>(to), packed);
  }
  OOM_LANE __m256 ZeroSmall(__m256 x, int32_t bits) {
    const __m256i magnitude =
        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(bits), magnitude);
    return _mm256_andnot_ps(_mm256_castsi256_ps(small), x);
  }
  OOM_LANE __m256 Canonical(__m256 x) {
    const __m256 canonical = _mm256_castsi256_ps(_mm256_set1_epi32(kCanonicalNanBits));
    return _mm256_blendv_ps(x, canonical, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
#undef OOM_LANE
};

}  // namespace

constinit const AdamWKernels kAvx2Kernels = MakeKernels<Avx2Lanes>();

}  // namespace oom::internal
