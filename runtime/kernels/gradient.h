// Gradients on the device, as runtime/optim has them on the host (engine rules, section 3), with
// the same bits: roundings, the sum over ranks, the squares of a 4,096-block and their sum. A
// partial is what one rank contributes: BF16, FP32, or the FP32 accumulator of a bfloat16 job,
// which is rounded once to BF16 before the partials are added in FP32 in rank order. The spans are
// read on the host before a call returns; the arrays behind them are on the device, 16-byte
// aligned.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "runtime/optim/adamw.h"

namespace oom {

// Ranks of one job, as in runtime/optim.
inline constexpr int kMaxGradientRanks = 64;

// FP32 accumulators, each rounded once to BF16 (accumulation over 1).
struct RoundedPartials {
  std::span<const float* const> ranks;
};

// Round to nearest even, NaN kept quiet.
void RoundToBfloat16(const float* values, int64_t elements, uint16_t* out, cudaStream_t stream);

// accumulator += values, FP32.
void AccumulateFloat32(const float* values, int64_t elements, float* accumulator,
                       cudaStream_t stream);
// The same for an accumulator in registered host memory, read and written across the bus: with few
// blocks, for it waits on the bus and other kernels need the processors meanwhile.
void AccumulateFloat32OnHost(const float* values, int64_t elements, float* accumulator,
                             cudaStream_t stream);

// Sum of squares of each 4,096-block of the summed gradient: 16 strided FP64 lanes, fixed tree; a
// NaN is the positive quiet one. `block_squares` has elements / 4096 entries. Sets *finite to 0 if
// any value is not finite, else leaves it. REQUIRES: elements is a multiple of 4,096.
void GradientSquares(const Bfloat16Partials& gradient, int64_t elements, double* block_squares,
                     int32_t* finite, cudaStream_t stream);
void GradientSquares(const Float32Partials& gradient, int64_t elements, double* block_squares,
                     int32_t* finite, cudaStream_t stream);
void GradientSquares(const RoundedPartials& gradient, int64_t elements, double* block_squares,
                     int32_t* finite, cudaStream_t stream);

// *sum = ((*sum + block_squares[0]) + block_squares[1]) + ...: blocks in canonical order, so that
// calls for one run of blocks after another continue one sum. One dependent addition a block.
void AddSquaresInOrder(const double* block_squares, int64_t blocks, double* sum,
                       cudaStream_t stream);

}  // namespace oom
