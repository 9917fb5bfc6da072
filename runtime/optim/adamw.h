// AdamW as one defined sequence of correctly rounded FP32 operations (engine rules, section 2), so
// that AVX-512, AVX2, scalar and CUDA give the same bits for any partition of the work. State
// layouts (engine rules, section 1), by blocks of kBlockElements = 4,096 parameters:
//   bfloat16: weight uint16[n] contiguous; beside it per block {float moment1[4096]; float
//   moment2[4096];
//             int16 weight_low[4096]}, 40,960 bytes a block. master = (weight << 16) + weight_low.
//   float32:  master float[n] contiguous; beside it per block {float moment1[4096]; float
//   moment2[4096]}.
// Every NaN that is stored (weight, moment) is 0x7FC00000: neither the sign and payload of a NaN
// operand nor the order of operands shows. A negative moment2, which no update produces, counts as
// below the threshold. With learning rate 0 (step_size 0, decay 1) the moments are updated and no
// weight is written. Stateless functions, thread-safe on disjoint ranges. Call them under a
// ScopedOptimizerMxcsr.

#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace oom {

inline constexpr int64_t kSplitRestBytesPerBlock = 4096 * 10;
inline constexpr int64_t kMasterRestBytesPerBlock = 4096 * 8;

struct AdamWHyperparameters {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
};

// The scalars of one update, computed in double and rounded once to FP32.
struct AdamWScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float decay;              // d = 1 - lr*wd
  float step_size;          // a = lr / (1 - beta1^t)
  float second_correction;  // q = 1 / sqrt(1 - beta2^t)
  float epsilon;
  float clip;  // k; exactly 1 means no clipping. REQUIRES: below 2^70.
};

// REQUIRES: step >= 1 (it counts from 1), betas in [0, 1). `decayed` false: weight decay 0.
AdamWScalars MakeAdamWScalars(const AdamWHyperparameters& hyper, double learning_rate, int64_t step,
                              bool decayed, double clip);

enum class SimdLevel { kScalar, kAvx2, kAvx512 };
// The best level of this CPU, lowered by the environment variable OOM_SIMD=scalar|avx2|avx512;
// another value changes nothing. REQUIRES for the calls below: a level not above this CPU's.
SimdLevel DetectSimdLevel();
std::string_view SimdLevelName(SimdLevel level);

// The gradient of an update: one partial per rank, added in FP32 in rank order (one: taken as it
// is). Each partial points at the same element range as the state pointers.
struct Bfloat16Partials {
  std::span<const uint16_t* const> ranks;
};
struct Float32Partials {
  std::span<const float* const> ranks;
};

// Updates `elements` parameters. elements and first_in_block are multiples of 16; the range may
// begin and end inside a block. `rest` points at the start of the block that holds the first
// element, 16-byte aligned or better.
struct SplitState {
  uint16_t* weight;  // At the first element of the range.
  std::byte* rest;   // At the block that holds the first element.
  int64_t first_in_block = 0;
};
struct MasterState {
  float* master;
  std::byte* rest;
  int64_t first_in_block = 0;
};
void AdamWUpdate(SimdLevel level, const AdamWScalars& scalars, const Bfloat16Partials& gradient,
                 const SplitState& state, int64_t elements);
// FP32 gradients into split state (device reduction, accumulators).
void AdamWUpdate(SimdLevel level, const AdamWScalars& scalars, const Float32Partials& gradient,
                 const SplitState& state, int64_t elements);
void AdamWUpdate(SimdLevel level, const AdamWScalars& scalars, const Float32Partials& gradient,
                 const MasterState& state, int64_t elements);

// Sum of squares of each 4,096-block of the summed gradient (16 strided FP64 lanes, fixed tree;
// engine rules, section 3). `out_blocks` has elements / 4096 entries. Returns false if any value is
// not finite.
bool GradientSquares(SimdLevel level, const Bfloat16Partials& gradient, int64_t elements,
                     std::span<double> out_blocks);
bool GradientSquares(SimdLevel level, const Float32Partials& gradient, int64_t elements,
                     std::span<double> out_blocks);

// k = min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0; NaN if norm is.
double ClipFactor(double norm, double max_norm);

// Split and join of masters; a NaN is stored as 0x7FC00000.
void SplitMasters(std::span<const float> masters, uint16_t* weight, int16_t* weight_low);
void JoinMasters(const uint16_t* weight, const int16_t* weight_low, std::span<float> masters);

// Round to nearest even, NaN kept quiet: the rounding of a gradient partial.
void RoundToBfloat16(std::span<const float> values, uint16_t* out);
// accumulator += values, FP32.
void AccumulateFloat32(std::span<const float> values, float* accumulator);

// Round to nearest, denormals handled by the thresholds of the rule and not by the CPU's modes.
// Restores the previous MXCSR on destruction. One per optimizer thread.
class ScopedOptimizerMxcsr {
 public:
  ScopedOptimizerMxcsr();
  ~ScopedOptimizerMxcsr();
  ScopedOptimizerMxcsr(const ScopedOptimizerMxcsr&) = delete;
  ScopedOptimizerMxcsr& operator=(const ScopedOptimizerMxcsr&) = delete;

 private:
  unsigned previous_;
};

}  // namespace oom
