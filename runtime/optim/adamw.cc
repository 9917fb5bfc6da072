#include "runtime/optim/adamw.h"

#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "runtime/base/check.h"
#include "runtime/optim/adamw_kernels.h"

namespace oom {
namespace {

using internal::AdamWKernels;
using internal::kAdamWBlockElements;
using internal::kSquareLanes;
using internal::MasterRun;
using internal::PartialsView;
using internal::SplitRun;

// Round to nearest, every exception masked, neither flush-to-zero nor denormals-are-zero.
constexpr unsigned kOptimizerMxcsr = 0x1F80;

const AdamWKernels& KernelsOf(SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx512:
      return internal::kAvx512Kernels;
    case SimdLevel::kAvx2:
      return internal::kAvx2Kernels;
    case SimdLevel::kScalar:
      break;
  }
  return internal::kScalarKernels;
}

SimdLevel BestLevelOfCpu() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return SimdLevel::kScalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? SimdLevel::kAvx512 : SimdLevel::kAvx2;
}

SplitRun RunAt(const SplitState& state, int64_t block_offset, int64_t done, int64_t in_block,
               int64_t elements) {
  std::byte* const block = state.rest + block_offset * kSplitRestBytesPerBlock;
  float* const moments = reinterpret_cast<float*>(block);
  int16_t* const low = reinterpret_cast<int16_t*>(block + kMasterRestBytesPerBlock);
  return {.weight = state.weight + done,
          .weight_low = low + in_block,
          .moment1 = moments + in_block,
          .moment2 = moments + kAdamWBlockElements + in_block,
          .elements = elements,
          .left_in_block = kAdamWBlockElements - in_block};
}

MasterRun RunAt(const MasterState& state, int64_t block_offset, int64_t done, int64_t in_block,
                int64_t elements) {
  float* const moments =
      reinterpret_cast<float*>(state.rest + block_offset * kMasterRestBytesPerBlock);
  return {.master = state.master + done,
          .moment1 = moments + in_block,
          .moment2 = moments + kAdamWBlockElements + in_block,
          .elements = elements,
          .left_in_block = kAdamWBlockElements - in_block};
}

// Cuts the range at the blocks' boundaries: the first run may be partial, and so may the last.
template <class T, class State, class Kernel>
void UpdateByBlock(Kernel kernel, const AdamWScalars& scalars, std::span<const T* const> ranks,
                   const State& state, int64_t elements) {
  OOM_CHECK(!ranks.empty());
  OOM_CHECK(elements >= 0 && elements % 16 == 0);
  OOM_CHECK(state.first_in_block >= 0 && state.first_in_block % 16 == 0);
  OOM_CHECK(state.first_in_block < kAdamWBlockElements);
  int64_t in_block = state.first_in_block;
  for (int64_t done = 0, block = 0; done < elements; ++block) {
    const int64_t run = std::min(kAdamWBlockElements - in_block, elements - done);
    const PartialsView<T> view{
        .ranks = ranks.data(), .rank_count = static_cast<int64_t>(ranks.size()), .first = done};
    kernel(scalars, view, RunAt(state, block, done, in_block, run));
    done += run;
    in_block = 0;
  }
}

// ((0+8)+(4+12)) + ((2+10)+(6+14)) and so on: halves are folded onto each other.
double FoldLanes(double* lanes) {
  for (int half = kSquareLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class T, class Kernel>
bool SquaresByBlock(Kernel kernel, std::span<const T* const> ranks, int64_t elements,
                    std::span<double> out_blocks) {
  OOM_CHECK(!ranks.empty());
  OOM_CHECK(elements >= 0 && elements % kAdamWBlockElements == 0);
  OOM_CHECK(static_cast<int64_t>(out_blocks.size()) == elements / kAdamWBlockElements);
  bool all_finite = true;
  for (size_t block = 0; block < out_blocks.size(); ++block) {
    double lanes[kSquareLanes];
    kernel({.ranks = ranks.data(),
            .rank_count = static_cast<int64_t>(ranks.size()),
            .first = static_cast<int64_t>(block) * kAdamWBlockElements},
           lanes);
    // 4,096 squares of finite FP32 values stay below 2^269, so the sum is finite if every value is.
    double sum = FoldLanes(lanes);
    if (std::isnan(sum)) sum = std::numeric_limits<double>::quiet_NaN();  // One sign and payload.
    out_blocks[block] = sum;
    all_finite = all_finite && std::isfinite(sum);
  }
  return all_finite;
}

}  // namespace

AdamWScalars MakeAdamWScalars(const AdamWHyperparameters& hyper, double learning_rate, int64_t step,
                              bool decayed, double clip) {
  OOM_CHECK(step >= 1);
  const double weight_decay = decayed ? hyper.weight_decay : 0.0;
  const double correction1 = 1.0 - std::pow(hyper.beta1, static_cast<double>(step));
  const double correction2 = 1.0 - std::pow(hyper.beta2, static_cast<double>(step));
  return {.beta1 = static_cast<float>(hyper.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1),
          .beta2 = static_cast<float>(hyper.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2),
          .decay = static_cast<float>(1.0 - learning_rate * weight_decay),
          .step_size = static_cast<float>(learning_rate / correction1),
          .second_correction = static_cast<float>(1.0 / std::sqrt(correction2)),
          .epsilon = static_cast<float>(hyper.epsilon),
          .clip = static_cast<float>(clip)};
}

SimdLevel DetectSimdLevel() {
  const SimdLevel best = BestLevelOfCpu();
  const char* const wanted = std::getenv("OOM_SIMD");
  if (wanted == nullptr) return best;
  for (const SimdLevel level : {SimdLevel::kScalar, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (wanted == SimdLevelName(level)) return std::min(best, level);
  }
  return best;
}

std::string_view SimdLevelName(SimdLevel level) {
  switch (level) {
    case SimdLevel::kScalar:
      return "scalar";
    case SimdLevel::kAvx2:
      return "avx2";
    case SimdLevel::kAvx512:
      return "avx512";
  }
  return "unknown";
}

void AdamWUpdate(SimdLevel level, const AdamWScalars& scalars, const Bfloat16Partials& gradient,
                 const SplitState& state, int64_t elements) {
  UpdateByBlock(KernelsOf(level).bfloat16_into_split, scalars, gradient.ranks, state, elements);
}

void AdamWUpdate(SimdLevel level, const AdamWScalars& scalars, const Float32Partials& gradient,
                 const SplitState& state, int64_t elements) {
  UpdateByBlock(KernelsOf(level).float32_into_split, scalars, gradient.ranks, state, elements);
}

void AdamWUpdate(SimdLevel level, const AdamWScalars& scalars, const Float32Partials& gradient,
                 const MasterState& state, int64_t elements) {
  UpdateByBlock(KernelsOf(level).float32_into_master, scalars, gradient.ranks, state, elements);
}

bool GradientSquares(SimdLevel level, const Bfloat16Partials& gradient, int64_t elements,
                     std::span<double> out_blocks) {
  return SquaresByBlock(KernelsOf(level).bfloat16_squares, gradient.ranks, elements, out_blocks);
}

bool GradientSquares(SimdLevel level, const Float32Partials& gradient, int64_t elements,
                     std::span<double> out_blocks) {
  return SquaresByBlock(KernelsOf(level).float32_squares, gradient.ranks, elements, out_blocks);
}

double ClipFactor(double norm, double max_norm) {
  if (max_norm == 0.0) return 1.0;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1.0 ? 1.0 : factor;  // A NaN norm gives NaN: it must not pass for "no clipping".
}

ScopedOptimizerMxcsr::ScopedOptimizerMxcsr() : previous_(_mm_getcsr()) {
  _mm_setcsr(kOptimizerMxcsr);
}

ScopedOptimizerMxcsr::~ScopedOptimizerMxcsr() { _mm_setcsr(previous_); }

}  // namespace oom
