// The Gated DeltaNet mixer of gated_delta_net.h on the GPU: BF16 activations, key and value heads
// of 128, four taps. What lies between the projections stays FP32 or FP16 within kernels where the
// composite's is wide, so errors are the composite's or less; weight gradients, and the input's,
// are summed in FP32 straight from BF16 operands.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/ops/gated_delta_net.h"

namespace oom {

// A batch's documents and chunks as the kernels read them, in one piece of device memory. Made once
// a batch: the copy is asynchronous on the current stream, but stands behind other copies to the
// device.
struct DeltaNetBatch {
  DeltaNetBatch(const std::vector<int64_t>& cu_seqlens, const at::Device& device);

  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t chunks = 0;
  at::Tensor cu_seqlens;       // [D + 1] int64.
  at::Tensor chunk_list;       // [chunks, 2] int64: DeltaChunk's bytes.
  at::Tensor document_chunks;  // [D + 1] int32.
};

GatedDeltaNetOutput CudaGatedDeltaNetForward(const GatedDeltaNetShape& shape,
                                             const GatedDeltaNetTensors& weights,
                                             const at::Tensor& x_TH,
                                             const GatedDeltaNetState& state,
                                             const DeltaNetBatch& batch, GatedDeltaNetSaved* saved);

GatedDeltaNetGradients CudaGatedDeltaNetBackward(
    const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights, const at::Tensor& dy_TH,
    const GatedDeltaNetState& dstate, const GatedDeltaNetSaved& saved, const DeltaNetBatch& batch,
    GatedDeltaNetTensors* gradients);

// As GatedDeltaNetForward and GatedDeltaNetBackward; they make the batch themselves.
GatedDeltaNetOutput CudaGatedDeltaNetForward(const GatedDeltaNetShape& shape,
                                             const GatedDeltaNetTensors& weights,
                                             const at::Tensor& x_TH,
                                             const GatedDeltaNetState& state,
                                             const std::vector<int64_t>& cu_seqlens,
                                             GatedDeltaNetSaved* saved);

GatedDeltaNetGradients CudaGatedDeltaNetBackward(
    const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights, const at::Tensor& dy_TH,
    const GatedDeltaNetState& dstate, const GatedDeltaNetSaved& saved,
    const std::vector<int64_t>& cu_seqlens, GatedDeltaNetTensors* gradients);

}  // namespace oom
