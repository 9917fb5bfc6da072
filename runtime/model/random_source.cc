// Counter-based normal initialisation. Element i of a tensor depends on the seed, the tensor's name
// and i alone: Philox-4x32-10 (Salmon et al., 2011) keyed by seed and name turns the counter into
// two 64-bit words, Box-Muller turns these into the two normal values of elements 2c and 2c+1. log,
// sin and cos of the C library differ in their last bits between machines; here they are
// polynomials in IEEE double arithmetic (+ - * / sqrt, no contraction), so every machine gets the
// same bits.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/model/state_source.h"

// The loops below for the widest vectors of the machine. A sanitizer is not there yet when the
// choice is made.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OOM_VECTOR_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define OOM_VECTOR_CLONES
#endif

namespace oom {
namespace {

// FNV-1a: the stream of a tensor.
uint64_t HashName(const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char character : name) {
    hash = (hash ^ static_cast<unsigned char>(character)) * 0x100000001B3u;
  }
  return hash;
}

// Pairs that are made together: each step of the arithmetic is a loop over them, which the compiler
// turns into vector instructions. Those are the same IEEE operations, so the bits are the same with
// any width.
constexpr int64_t kPairs = 256;
template <class Value>
using Lanes = std::array<Value, kPairs>;

// 53 bits of each of Philox's two 64-bit words, for counters first, first + 1, ...
void PhiloxBits(uint64_t first, uint64_t stream, uint64_t key, Lanes<uint64_t>* a,
                Lanes<uint64_t>* b) {
  for (int64_t i = 0; i < kPairs; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    uint64_t c0 = counter & 0xFFFFFFFFu;
    uint64_t c1 = counter >> 32;
    uint64_t c2 = stream & 0xFFFFFFFFu;
    uint64_t c3 = stream >> 32;
    uint64_t k0 = key & 0xFFFFFFFFu;
    uint64_t k1 = key >> 32;
    for (int round = 0; round < 10; ++round) {
      const uint64_t x = uint64_t{0xD2511F53u} * c0;
      const uint64_t y = uint64_t{0xCD9E8D57u} * c2;
      c0 = (y >> 32) ^ c1 ^ k0;
      c1 = y & 0xFFFFFFFFu;
      c2 = (x >> 32) ^ c3 ^ k1;
      c3 = x & 0xFFFFFFFFu;
      k0 = (k0 + 0x9E3779B9u) & 0xFFFFFFFFu;
      k1 = (k1 + 0xBB67AE85u) & 0xFFFFFFFFu;
    }
    (*a)[i] = (c0 | c1 << 32) >> 11;
    (*b)[i] = (c2 | c3 << 32) >> 11;
  }
}

// An integer below 2^53 as a double, without the conversion instruction that AVX2 lacks: both
// halves are exact.
inline double ToDouble(uint64_t value) {
  const double high = std::bit_cast<double>((value >> 32) | 0x4530000000000000u) - 0x1p84;
  const double low = std::bit_cast<double>((value & 0xFFFFFFFFu) | 0x4330000000000000u) - 0x1p52;
  return high + low;
}

// Natural logarithm of a normal x > 0: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), and
// log m = 2 atanh(s), s = (m-1)/(m+1), |s| < 0.1716. The series to s^21 is exact to 2^-53.
inline double Log(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t shifted = bits - 0x3FE6A09E667F3BCDu;  // The bits of sqrt(1/2).
  // e + 2048, which is not negative.
  const uint64_t biased = (shifted + (uint64_t{2048} << 52)) >> 52;
  const double m = std::bit_cast<double>(bits - ((biased - 2048) << 52));
  const double exponent = ToDouble(biased) - 2048.0;
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double sum = 1.0 / 21.0;
  sum = sum * z + 1.0 / 19;
  sum = sum * z + 1.0 / 17;
  sum = sum * z + 1.0 / 15;
  sum = sum * z + 1.0 / 13;
  sum = sum * z + 1.0 / 11;
  sum = sum * z + 1.0 / 9;
  sum = sum * z + 1.0 / 7;
  sum = sum * z + 1.0 / 5;
  sum = sum * z + 1.0 / 3;
  return exponent * 0x1.62e42fefa39efp-1 + 2.0 * (s + s * z * sum);
}

struct SinCos {
  double sin, cos;
};

// sin and cos of 2 pi u, u in [0, 1): the quarter turn by exact arithmetic, the rest, |t| <= pi/4,
// by Taylor series to t^17 and t^16.
inline SinCos TurnSinCos(double u) {
  const double quarters = u * 4.0;
  // Rounds down: the argument is positive and small.
  const auto quarter = static_cast<int32_t>(quarters + 0.5);
  const double t = (quarters - static_cast<double>(quarter)) * 0x1.921fb54442d18p+0;
  const double z = t * t;
  double s = 1.0;
  s = 1.0 - z * (1.0 / (16 * 17)) * s;
  s = 1.0 - z * (1.0 / (14 * 15)) * s;
  s = 1.0 - z * (1.0 / (12 * 13)) * s;
  s = 1.0 - z * (1.0 / (10 * 11)) * s;
  s = 1.0 - z * (1.0 / (8 * 9)) * s;
  s = 1.0 - z * (1.0 / (6 * 7)) * s;
  s = 1.0 - z * (1.0 / (4 * 5)) * s;
  s = 1.0 - z * (1.0 / (2 * 3)) * s;
  s = t * s;
  double c = 1.0;
  c = 1.0 - z * (1.0 / (15 * 16)) * c;
  c = 1.0 - z * (1.0 / (13 * 14)) * c;
  c = 1.0 - z * (1.0 / (11 * 12)) * c;
  c = 1.0 - z * (1.0 / (9 * 10)) * c;
  c = 1.0 - z * (1.0 / (7 * 8)) * c;
  c = 1.0 - z * (1.0 / (5 * 6)) * c;
  c = 1.0 - z * (1.0 / (3 * 4)) * c;
  c = 1.0 - z * (1.0 / (1 * 2)) * c;
  const bool odd = (quarter & 1) != 0;
  const double sin = odd ? c : s;
  const double cos = odd ? s : c;
  return {.sin = (quarter & 2) != 0 ? -sin : sin, .cos = ((quarter + 1) & 2) != 0 ? -cos : cos};
}

// The normal values of kPairs pairs of elements, the first of which is pair `first`.
OOM_VECTOR_CLONES
void NormalPairs(uint64_t first, uint64_t stream, uint64_t key, double deviation,
                 std::array<float, 2 * kPairs>* out) {
  Lanes<uint64_t> a, b;
  PhiloxBits(first, stream, key, &a, &b);
  Lanes<double> x, y;
  for (int64_t i = 0; i < kPairs; ++i) {
    // (0, 1], so that the logarithm is finite: the largest value is sqrt(2 * 53 * log 2) = 8.6.
    const double u = ToDouble(a[i] + 1) * 0x1p-53;
    const SinCos turn = TurnSinCos(ToDouble(b[i]) * 0x1p-53);
    const double radius = std::sqrt(-2.0 * Log(u)) * deviation;
    x[i] = radius * turn.cos;
    y[i] = radius * turn.sin;
  }
  for (int64_t i = 0; i < kPairs; ++i) {
    (*out)[2 * i] = static_cast<float>(x[i]);
    (*out)[2 * i + 1] = static_cast<float>(y[i]);
  }
}

class RandomSource : public StateSource {
 public:
  RandomSource(const ModelDescription& model, std::vector<ParameterUnit> units, uint64_t seed)
      : units_(std::move(units)),
        norm_scale_(model.norm.scale),
        deviation_(model.initializer_range),
        seed_(seed) {}

  Status Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
              std::span<float> out) const override {
    const TensorSpec& spec =
        units_.at(static_cast<size_t>(unit)).tensors.at(static_cast<size_t>(tensor));
    OOM_CHECK(first_element >= 0 &&
              first_element + static_cast<int64_t>(out.size()) <= spec.elements);
    if (array != StateArray::kMaster) {
      for (float& value : out) value = 0.0f;
    } else if (const std::optional<float> constant = Constant(spec.role)) {
      for (float& value : out) value = *constant;
    } else if (spec.role == TensorRole::kDeltaALog) {
      FillALog(HashName(spec.name), first_element, out);
    } else {
      Fill(HashName(spec.name), first_element, out);
    }
    return Status::Ok();
  }

  int64_t step() const override { return 0; }

 private:
  // What a tensor holds instead of normal values, as its family starts it.
  std::optional<float> Constant(TensorRole role) const {
    switch (role) {
      case TensorRole::kInputNorm:
      case TensorRole::kQueryNorm:
      case TensorRole::kKeyNorm:
      case TensorRole::kMixerOutputNorm:
      case TensorRole::kPostNorm:
      case TensorRole::kDenseOutputNorm:
      case TensorRole::kExpertsNorm:
      case TensorRole::kExpertsOutputNorm:
      case TensorRole::kMixtureOutputNorm:
      case TensorRole::kFinalNorm:
        return norm_scale_ == NormScale::kOnePlusWeight ? 0.0f : 1.0f;
      case TensorRole::kDeltaNorm:
      case TensorRole::kDeltaDtBias:
      case TensorRole::kRouterScale:
      case TensorRole::kExpertScale:
      case TensorRole::kLayerScale:
        return 1.0f;
      default:
        return std::nullopt;
    }
  }

  void Fill(uint64_t stream, int64_t first_element, std::span<float> out) const {
    const int64_t end = first_element + static_cast<int64_t>(out.size());
    std::array<float, 2 * kPairs> values;
    for (int64_t pair = first_element / 2; 2 * pair < end; pair += kPairs) {
      NormalPairs(static_cast<uint64_t>(pair), stream, seed_, deviation_, &values);
      const int64_t from = std::max(first_element, 2 * pair);
      const int64_t to = std::min(end, 2 * (pair + kPairs));
      std::copy(values.begin() + (from - 2 * pair), values.begin() + (to - 2 * pair),
                out.begin() + (from - first_element));
    }
  }

  // The logarithm of a value evenly spread over (0, 16].
  void FillALog(uint64_t stream, int64_t first_element, std::span<float> out) const {
    for (size_t i = 0; i < out.size(); ++i) {
      Lanes<uint64_t> a, b;
      PhiloxBits(static_cast<uint64_t>(first_element) + i, stream, seed_, &a, &b);
      out[i] = static_cast<float>(Log(16.0 * (ToDouble(a[0] + 1) * 0x1p-53)));
    }
  }

  const std::vector<ParameterUnit> units_;
  const NormScale norm_scale_;
  const double deviation_;
  const uint64_t seed_;
};

}  // namespace

std::unique_ptr<StateSource> MakeRandomSource(const ModelDescription& model,
                                              std::vector<ParameterUnit> units, uint64_t seed) {
  return std::make_unique<RandomSource>(model, std::move(units), seed);
}

}  // namespace oom
