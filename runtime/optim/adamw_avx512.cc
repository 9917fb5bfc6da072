// The update on 16 parameters at a time with AVX-512 (F, BW, DQ, VL).

#include <immintrin.h>

#include "runtime/optim/adamw_step.h"

namespace oom::internal {
namespace {

struct Avx512Lanes {
  static constexpr int64_t kWidth = 16;
  using F = __m512;

#define OOM_LANE static OOM_LANES_INLINE
  OOM_LANE F Broadcast(float x) { return _mm512_set1_ps(x); }
  OOM_LANE F Load(const float* from) { return _mm512_loadu_ps(from); }
  OOM_LANE void Store(float* to, F x) { _mm512_storeu_ps(to, x); }
  OOM_LANE F LoadBfloat16(const uint16_t* from) { return _mm512_castsi512_ps(HighHalf(from)); }
  OOM_LANE F Add(F a, F b) { return _mm512_add_ps(a, b); }
  OOM_LANE F Multiply(F a, F b) { return _mm512_mul_ps(a, b); }
  OOM_LANE F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  OOM_LANE F NegativeFma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  OOM_LANE F Divide(F a, F b) { return _mm512_div_ps(a, b); }
  OOM_LANE F SquareRoot(F x) { return _mm512_sqrt_ps(x); }
  OOM_LANE F ZeroIfSmall(F x, int32_t bits) {
    const __m512i magnitude =
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
    return _mm512_maskz_mov_ps(_mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(bits)), x);
  }
  OOM_LANE F ZeroIfLess(F x, F y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ), x);
  }
  OOM_LANE bool AnyNan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
  OOM_LANE F CanonicalNan(F x) {
    const __m512 canonical = _mm512_castsi512_ps(_mm512_set1_epi32(kCanonicalNanBits));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), canonical);
  }
  OOM_LANE F LoadMaster(const uint16_t* weight, const int16_t* weight_low) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight_low));
    return _mm512_castsi512_ps(_mm512_add_epi32(HighHalf(weight), _mm512_cvtepi16_epi32(halves)));
  }
  OOM_LANE void StoreMaster(F x, uint16_t* weight, int16_t* weight_low) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    // weight << 16 ends in 16 zeros, so the difference modulo 2^16 is the low half itself.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight_low), _mm512_cvtepi32_epi16(bits));
  }

  struct SquareSum {
    __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    OOM_LANES_INLINE void Add(F x, int64_t) {
      AddEight(&sums[0], _mm512_castps512_ps256(x));
      AddEight(&sums[1], _mm512_extractf32x8_ps(x, 1));
    }
    OOM_LANES_INLINE void Store(double* to) const {
      for (int i = 0; i < 2; ++i) _mm512_storeu_pd(to + 8 * i, sums[i]);
    }
    OOM_LANE void AddEight(__m512d* sum, __m256 x) {
      const __m512d wide = _mm512_cvtps_pd(x);
      *sum = _mm512_add_pd(*sum, _mm512_mul_pd(wide, wide));
    }
  };

 private:
  OOM_LANE __m512i HighHalf(const uint16_t* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
#undef OOM_LANE
};

}  // namespace

constinit const AdamWKernels kAvx512Kernels = MakeKernels<Avx512Lanes>();

}  // namespace oom::internal
