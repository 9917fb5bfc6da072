// Which layers the kernels of GPUs serve in BF16: the others run as composites, which take more
// memory and may wait. Pure functions of descriptions, for the operators and for the planner's
// memory account, which knows no CUDA.

#pragma once

#include "runtime/model/description.h"

namespace oom {

inline bool GpuKernelsServe(const AttentionDescription& attention) {
  constexpr int64_t kHeadSizeMax = 512;     // Of the rotary kernels.
  constexpr int64_t kHeadSizeMultiple = 8;  // Of every attention.
  return attention.head_size <= kHeadSizeMax && attention.head_size % kHeadSizeMultiple == 0;
}

inline bool GpuKernelsServe(const DeltaNetDescription& delta) {
  constexpr int64_t kHeadSize = 128, kTaps = 4;
  return delta.key_head_size == kHeadSize && delta.value_head_size == kHeadSize &&
         delta.tap_count == kTaps;
}

inline bool GpuKernelsServeMixer(const LayerDescription& layer) {
  return layer.mixer == MixerKind::kDeltaNet ? GpuKernelsServe(layer.delta_net)
                                             : GpuKernelsServe(layer.attention);
}

inline bool GpuKernelsServeMixture(const ModelDescription& model, const LayerDescription& layer) {
  constexpr int64_t kExpertsMax = 512, kChoicesMax = 16;  // Of the router's kernels.
  return !HasExperts(layer.mixture) ||
         (model.expert_count <= kExpertsMax && model.experts_per_token <= kChoicesMax);
}

}  // namespace oom
