// Counter-based normal initialisation. Element i of a tensor depends on the seed, the tensor's name
// and i alone: Philox-4x32-10 (Salmon et al., 2011) keyed by seed and name turns the counter into
// two 64-bit words, Box-Muller turns these into the two normal values of elements 2c and 2c+1. log,
// sin and cos of the C library differ in their last bits between machines; here they are
// polynomials in IEEE double arithmetic (+ - * / sqrt, no contraction), so every machine gets the
// same bits.

#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/model/state_source.h"

namespace oom {
namespace {

struct Words {
  uint64_t first, second;
};

Words Philox(uint64_t counter, uint64_t stream, uint64_t key) {
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                               static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c[0] | uint64_t{c[1]} << 32, c[2] | uint64_t{c[3]} << 32};
}

// FNV-1a: the stream of a tensor.
uint64_t HashName(const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char character : name) {
    hash = (hash ^ static_cast<unsigned char>(character)) * 0x100000001B3u;
  }
  return hash;
}

// Natural logarithm of a normal x > 0: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), and
// log m = 2 atanh(s), s = (m-1)/(m+1), |s| < 0.1716. The series to s^21 is exact to 2^-53.
double Log(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t shifted = bits - 0x3FE6A09E667F3BCDu;  // The bits of sqrt(1/2).
  const int64_t exponent = static_cast<int64_t>(shifted) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<uint64_t>(exponent) << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double sum = 1.0 / 21.0;
  for (int n = 19; n >= 3; n -= 2) sum = sum * z + 1.0 / n;
  return static_cast<double>(exponent) * 0x1.62e42fefa39efp-1 + 2.0 * (s + s * z * sum);
}

struct SinCos {
  double sin, cos;
};

// sin and cos of 2 pi u, u in [0, 1): the quarter turn by exact arithmetic, the rest, |t| <= pi/4,
// by Taylor series to t^17 and t^16.
SinCos TurnSinCos(double u) {
  const double quarters = u * 4.0;
  const int64_t quarter = static_cast<int64_t>(quarters + 0.5);
  const double t = (quarters - static_cast<double>(quarter)) * 0x1.921fb54442d18p+0;
  const double z = t * t;
  double sin_sum = 1.0;
  for (int n = 16; n >= 2; n -= 2) sin_sum = 1.0 - z * (1.0 / (n * (n + 1))) * sin_sum;
  double cos_sum = 1.0;
  for (int n = 15; n >= 1; n -= 2) cos_sum = 1.0 - z * (1.0 / (n * (n + 1))) * cos_sum;
  const double s = t * sin_sum;
  const double c = cos_sum;
  switch (quarter & 3) {
    case 0:
      return {s, c};
    case 1:
      return {c, -s};
    case 2:
      return {-s, -c};
    default:
      return {-c, s};
  }
}

class RandomSource : public StateSource {
 public:
  RandomSource(const ModelDescription& model, std::vector<ParameterUnit> units, uint64_t seed)
      : units_(std::move(units)), deviation_(model.initializer_range), seed_(seed) {}

  Status Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
              std::span<float> out) const override {
    const TensorSpec& spec =
        units_.at(static_cast<size_t>(unit)).tensors.at(static_cast<size_t>(tensor));
    OOM_CHECK(first_element >= 0 &&
              first_element + static_cast<int64_t>(out.size()) <= spec.elements);
    if (array != StateArray::kMaster) {
      for (float& value : out) value = 0.0f;
    } else if (IsNorm(spec.role)) {
      for (float& value : out) value = 1.0f;
    } else {
      Fill(HashName(spec.name), first_element, out);
    }
    return Status::Ok();
  }

  int64_t step() const override { return 0; }

 private:
  static bool IsNorm(TensorRole role) {
    return role == TensorRole::kInputNorm || role == TensorRole::kQueryNorm ||
           role == TensorRole::kKeyNorm || role == TensorRole::kPostNorm ||
           role == TensorRole::kFinalNorm;
  }

  void Fill(uint64_t stream, int64_t first_element, std::span<float> out) const {
    const int64_t end = first_element + static_cast<int64_t>(out.size());
    for (int64_t pair = first_element / 2; 2 * pair < end; ++pair) {
      const Words words = Philox(static_cast<uint64_t>(pair), stream, seed_);
      // (0, 1], so that the logarithm is finite: the largest value is sqrt(2 * 53 * log 2) = 8.6.
      const double u = static_cast<double>((words.first >> 11) + 1) * 0x1p-53;
      const SinCos turn = TurnSinCos(static_cast<double>(words.second >> 11) * 0x1p-53);
      const double radius = std::sqrt(-2.0 * Log(u)) * deviation_;
      const int64_t index = 2 * pair - first_element;
      if (index >= 0) out[static_cast<size_t>(index)] = static_cast<float>(radius * turn.cos);
      if (2 * pair + 1 < end)
        out[static_cast<size_t>(index + 1)] = static_cast<float>(radius * turn.sin);
    }
  }

  const std::vector<ParameterUnit> units_;
  const double deviation_;
  const uint64_t seed_;
};

}  // namespace

std::unique_ptr<StateSource> MakeRandomSource(const ModelDescription& model,
                                              std::vector<ParameterUnit> units, uint64_t seed) {
  return std::make_unique<RandomSource>(model, std::move(units), seed);
}

}  // namespace oom
