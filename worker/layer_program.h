// LayerProgram runs a layer's operators in the parts that the plan asks for (attention by query-head groups,
// the mixture by token chunks, the head by token chunks) and keeps what their backward needs.
// Stateless after construction; one thread (the compute stream).

#pragma once

#include <cstdint>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/model/description.h"
#include "runtime/ops/layer.h"

namespace oom {

// Of one layer, between its forward or replay and its backward.
struct LayerSaved {
  std::vector<MixerSaved> mixer;      // One a head group.
  std::vector<MixtureSaved> mixture;  // One a token chunk.
  at::Tensor mixer_output;            // Kept when only the mixer is retained: the mixture replays from it.

  int64_t bytes() const;
};

class LayerProgram {
 public:
  // REQUIRES: `model` outlives the object.
  LayerProgram(const ModelDescription* model, const v1::OperatorPartitions& partitions);

  // `saved` may be null: nothing is kept.
  at::Tensor ForwardMixer(int64_t layer, const LayerTensors& weights, const at::Tensor& x, const PackedBatch& batch,
                          std::vector<MixerSaved>* saved) const;
  at::Tensor BackwardMixer(int64_t layer, const LayerTensors& weights, const at::Tensor& dh,
                           const std::vector<MixerSaved>& saved, const PackedBatch& batch,
                           LayerTensors* gradients) const;
  // `replay`: ends at the gate/up product; the result is undefined.
  at::Tensor ForwardMixture(int64_t layer, const LayerTensors& weights, const at::Tensor& h,
                            std::vector<MixtureSaved>* saved, bool replay, RouterStats* stats) const;
  at::Tensor BackwardMixture(int64_t layer, const LayerTensors& weights, const at::Tensor& dy,
                             const std::vector<MixtureSaved>& saved, const LoadBalanceTerm& balance,
                             LayerTensors* gradients) const;

 private:
  std::vector<HeadRange> HeadGroups(const AttentionDescription& attention) const;
  std::vector<TokenRange> TokenChunks(int64_t tokens) const;

  const ModelDescription* const model_;
  const int64_t head_group_count_;
  const int64_t mixture_chunk_tokens_;
};

}  // namespace oom
