// The gated delta rule of packed documents, forward and backward, on tensor cores; formulas,
// letters and chunks as in runtime/ops/gated_delta_rule.h. Heads are of 128, keys and values alike.
//
// Stages, each parallel over chunks and heads but for the two that carry the state, which go
// through a document's chunks one after another:
//   prepare   B = (A * D) diag(beta), P = s D * (q k.T), sums of g; A by inverting in blocks of 16;
//   scan      W, R, o and the state, in documents' order;
//   sweep     dR, dW and the state's gradient E, in reverse, after a scan that keeps what it meets;
//   gradient  dP, dB, dL within the chunk; then dq and dk, a key head's value heads in order; dg.
//
// Precision: factors of products are FP16, sums, gates and carried states FP32, A is inverted in
// FP32. FP16 rounds eight times finer than BF16, and its range is met thus: q and k are of length
// 1; backward scales each value head's gradients by a power of two, undone at its results.
// REQUIRES: |v| and the elements of states below 2^12 or so; what is far above becomes infinite.
// The order of all sums follows from the shape and the chunks: results repeat bit for bit.
// No call allocates or waits; scratch is the caller's. Shapes: T tokens, G key heads, N value heads
// (N a multiple of G; value head n reads key head n / (N / G)), D documents, K = V = 128; all
// contiguous, aligned to 16 bytes. Arguments must not alias.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

inline constexpr int kDeltaHeadSize = 128;
inline constexpr int kDeltaChunk = 64;

// Tokens [first, first + count) of one document: at most 64, no multiple of 64 within.
struct DeltaChunk {
  int64_t first = 0;
  int32_t count = 0;
  int32_t document = 0;
};

struct GatedDeltaRuleShape {
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t chunks = 0;  // DeltaChunkCount (delta_chunks.h).
  int key_heads = 0;
  int value_heads = 0;
};

struct GatedDeltaRuleKernelInput {
  // Of delta_chunks.h.
  const DeltaChunk* chunks = nullptr;
  const int32_t* document_chunks = nullptr;
  const __half* query_TGK = nullptr;  // Both of length 1.
  const __half* key_TGK = nullptr;
  const __nv_bfloat16* value_TNV = nullptr;
  const float* log_decay_TN = nullptr;  // At most 0.
  const float* beta_TN = nullptr;       // Within [0, 1].
  const float* state_DNKV = nullptr;    // Null: zeros.
};

struct GatedDeltaRuleKernelOutput {
  __nv_bfloat16* output_TNV = nullptr;
  float* state_DNKV = nullptr;  // Null: not wanted.
};

// About 17 KiB a chunk and value head.
int64_t GatedDeltaRuleForwardScratchBytes(const GatedDeltaRuleShape& shape);

void GatedDeltaRuleForward(const GatedDeltaRuleShape& shape, const GatedDeltaRuleKernelInput& input,
                           const GatedDeltaRuleKernelOutput& output, void* scratch,
                           cudaStream_t stream);

struct GatedDeltaRuleOutputGradient {
  const float* output_TNV = nullptr;
  const float* state_DNKV = nullptr;  // Of the states after each document. Null: zeros.
};

struct GatedDeltaRuleKernelGradients {
  float* query_TGK = nullptr;
  float* key_TGK = nullptr;
  float* value_TNV = nullptr;
  float* log_decay_TN = nullptr;
  float* beta_TN = nullptr;
  float* state_DNKV = nullptr;  // Null: not wanted.
};

// About 170 KiB a chunk and value head.
int64_t GatedDeltaRuleBackwardScratchBytes(const GatedDeltaRuleShape& shape);

void GatedDeltaRuleBackward(const GatedDeltaRuleShape& shape,
                            const GatedDeltaRuleKernelInput& input,
                            const GatedDeltaRuleOutputGradient& doutput,
                            const GatedDeltaRuleKernelGradients& gradients, void* scratch,
                            cudaStream_t stream);

}  // namespace oom
