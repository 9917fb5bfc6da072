// What adamw.cc and the three instruction sets agree on: plain structs and tables of functions.
// Internal. The sources behind it are compiled with different instruction sets, so nothing here may
// be an inline function that the linker could merge: the AVX-512 copy would end up in the scalar
// program.

#pragma once

#include <cstdint>

#include "runtime/optim/adamw.h"

namespace oom::internal {

inline constexpr int64_t kAdamWBlockElements = 4096;
inline constexpr int kSquareLanes = 16;

// The gradient as one array of T (uint16_t holding BF16, or float) per rank.
template <class T>
struct PartialsView {
  const T* const* ranks;
  int64_t rank_count;
  int64_t first;  // Element of every rank's array at which the run starts.
};

// A run of parameters inside one block.
struct SplitRun {
  uint16_t* weight;
  int16_t* weight_low;
  float* moment1;
  float* moment2;
  int64_t elements;       // A multiple of 16.
  int64_t left_in_block;  // Elements from the run's first to the block's end.
};
struct MasterRun {
  float* master;
  float* moment1;
  float* moment2;
  int64_t elements;       // A multiple of 16.
  int64_t left_in_block;  // Elements from the run's first to the block's end.
};

// One per instruction set. The results of the three are bit-equal.
struct AdamWKernels {
  void (*bfloat16_into_split)(const AdamWScalars&, const PartialsView<uint16_t>&, const SplitRun&);
  void (*float32_into_split)(const AdamWScalars&, const PartialsView<float>&, const SplitRun&);
  void (*float32_into_master)(const AdamWScalars&, const PartialsView<float>&, const MasterRun&);
  // The 16 strided sums of squares of one whole block.
  void (*bfloat16_squares)(const PartialsView<uint16_t>&, double* lanes);
  void (*float32_squares)(const PartialsView<float>&, double* lanes);
};

extern const AdamWKernels kScalarKernels;
extern const AdamWKernels kAvx2Kernels;
extern const AdamWKernels kAvx512Kernels;

}  // namespace oom::internal
