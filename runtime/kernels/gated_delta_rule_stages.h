// The stages of gated_delta_rule.h and what they hand to each other in scratch memory, a tile of
// FP16 elements for every chunk and value head. Internal to this folder.

#pragma once

#include <cstdint>

#include "runtime/kernels/gated_delta_rule.h"

namespace oom::internal {

// FP32 numbers of a chunk's tokens, kGateRows x 64 for every chunk and value head. Behind a chunk's
// last token the sum of g stays what it was and beta is 0.
enum GateRow {
  kSinceStart = 0,  // e^G
  kUntilEnd = 1,    // e^(G_last - G)
  kSumHigh = 2,     // G = high + low: the difference of two large sums may be small, and counts.
  kSumLow = 3,
  kBeta = 4,
  kGateRows = 5,
};

inline constexpr int kSquareElements = kDeltaChunk * kDeltaChunk;
inline constexpr int kTokenElements = kDeltaChunk * kDeltaHeadSize;
inline constexpr int kStateElements = kDeltaHeadSize * kDeltaHeadSize;

// Gradients carry a factor 2^n (gated_delta_rule_scale.cuh) from the first stage to the last.
struct DeltaScratch {
  DeltaScratch(const GatedDeltaRuleShape& shape, bool backward, void* memory);
  static int64_t Bytes(const GatedDeltaRuleShape& shape, bool backward);

  float* gates = nullptr;    // [chunks, N, kGateRows, 64]
  __half* write = nullptr;   // B, [chunks, N, 64, 64]; then Z, zeros above the diagonal.
  __half* scores = nullptr;  // P, likewise; then s D * dP.
  // Backward only. V before K and tokens: a warp holds some columns of v of everything.
  __half* inverse = nullptr;      // A, [chunks, N, 64, 64]
  __half* states = nullptr;       // S before the chunk, [chunks, N, V, K]
  __half* missing = nullptr;      // W, [chunks, N, V, 64]
  __half* written = nullptr;      // R, [chunks, N, V, 64]
  uint32_t* magnitude = nullptr;  // Bits of the greatest |gradient|, [G]
  __half* doutput = nullptr;      // [T, N, V]
  __half* dstates = nullptr;      // E, [chunks, N, V, K]
  __half* dwritten = nullptr;     // dR, [chunks, N, V, 64]
  __half* dread = nullptr;        // -e^G dW, [chunks, N, V, 64]
  float* dsum = nullptr;          // Of G, what D contributes, [chunks, N, 64]

 private:
  int64_t bytes_ = 0;
};

struct DeltaStage {
  GatedDeltaRuleShape shape;
  GatedDeltaRuleKernelInput input;
  DeltaScratch scratch;
};

// B, P and gates; A too if scratch has room for it.
void PrepareDeltaChunks(const DeltaStage& stage, cudaStream_t stream);

// o and the states after each document, or, for backward, S, W and R.
void ScanDeltaChunks(const DeltaStage& stage, const GatedDeltaRuleKernelOutput& output,
                     cudaStream_t stream);
void ScanDeltaChunksForBackward(const DeltaStage& stage, cudaStream_t stream);

// The scaled FP16 copy of the output's gradient.
void ScaleDeltaGradients(const DeltaStage& stage, const GatedDeltaRuleOutputGradient& doutput,
                         cudaStream_t stream);

// E, dR, dread; dv and the gradient of the states before each document.
void SweepDeltaChunks(const DeltaStage& stage, const GatedDeltaRuleOutputGradient& doutput,
                      const GatedDeltaRuleKernelGradients& gradients, cudaStream_t stream);

// Z, s D * dP, what D adds to dG; dbeta.
void DeltaChunkGradients(const DeltaStage& stage, const GatedDeltaRuleKernelGradients& gradients,
                         cudaStream_t stream);

// dq, dk, dg.
void DeltaKeyGradients(const DeltaStage& stage, const GatedDeltaRuleKernelGradients& gradients,
                       cudaStream_t stream);

}  // namespace oom::internal
