// AdamW on the device: the update of runtime/optim/adamw.h, bit for bit (engine rules, section 2),
// on state laid out as runtime/memory/shm_layout.md says. Every operation is rounded as written
// there: no contraction, correctly rounded square root and division, denormals kept, thresholds on
// the bits, every stored NaN 0x7FC00000. All pointers are on the device, weights, rests and
// partials 16-byte aligned. Whole 4,096-blocks only.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/kernels/gradient.h"
#include "runtime/optim/adamw.h"

namespace oom {

struct DeviceAdamWOptions {
  AdamWScalars scalars;                     // Of blocks with weight decay; the others have decay 1.
  const uint8_t* decayed_blocks = nullptr;  // By block of the range, not 0: decayed. Null: all are.
  const float* clip = nullptr;              // Replaces scalars.clip; null: that is used.
};

// REQUIRES: elements is a multiple of 4,096, state.first_in_block 0.
void AdamWUpdate(const DeviceAdamWOptions& options, const Bfloat16Partials& gradient,
                 const SplitState& state, int64_t elements, cudaStream_t stream);
void AdamWUpdate(const DeviceAdamWOptions& options, const Float32Partials& gradient,
                 const SplitState& state, int64_t elements, cudaStream_t stream);
void AdamWUpdate(const DeviceAdamWOptions& options, const RoundedPartials& gradient,
                 const SplitState& state, int64_t elements, cudaStream_t stream);
void AdamWUpdate(const DeviceAdamWOptions& options, const Float32Partials& gradient,
                 const MasterState& state, int64_t elements, cudaStream_t stream);

}  // namespace oom
