// The Gated DeltaNet mixer of gated_delta_net.h on the GPU: BF16 activations, key and value heads
// of 128, four taps. What lies between the projections stays FP32 or FP16 within kernels where the
// composite's is wide, so errors are the composite's or less; weight gradients, and the input's,
// are summed in FP32 straight from BF16 operands.

#pragma once

#include <cstdint>

#include "runtime/model/description.h"
#include "runtime/ops/gated_delta_net.h"
#include "runtime/ops/segment.h"

namespace oom {

// A segment's documents and chunks as the kernels read them (kernels/delta_chunks.h), made on the
// device: one small kernel and no copy, so that every call can afford its own.
struct DeltaNetBatch {
  explicit DeltaNetBatch(const SequenceSegment& segment);

  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t chunks = 0;
  bool continued = false;      // Whether anyone wants the states after the documents.
  at::Tensor cu_seqlens;       // [D + 1] int64.
  at::Tensor chunk_list;       // [chunks, 2] int64: DeltaChunk's bytes.
  at::Tensor document_chunks;  // [D + 1] int32.
};

// As GatedDeltaNetForward; the states are undefined unless the segment is continued.
GatedDeltaNetOutput CudaGatedDeltaNetForward(const GatedDeltaNetShape& shape,
                                             const GatedDeltaNetTensors& weights,
                                             const at::Tensor& x_TH,
                                             const GatedDeltaNetState& state,
                                             const DeltaNetBatch& batch, GatedDeltaNetSaved* saved);

GatedDeltaNetGradients CudaGatedDeltaNetBackward(
    const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights, const at::Tensor& dy_TH,
    const GatedDeltaNetState& dstate, const GatedDeltaNetSaved& saved, const DeltaNetBatch& batch,
    GatedDeltaNetTensors* gradients);

}  // namespace oom
