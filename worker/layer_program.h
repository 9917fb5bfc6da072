// LayerProgram runs a layer's operators in the parts that the plan asks for (attention by sub-batches and query-head groups,
// Gated DeltaNet by segments, the mixture by token chunks) and keeps what their backward needs.
// Stateless after construction; one thread (the compute stream).

#pragma once

#include <cstdint>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/model/description.h"
#include "runtime/ops/layer.h"

namespace oom {

// Of attention over some whole sequences.
struct AttentionParts {
  TokenRange tokens;
  std::vector<MixerSaved> heads;  // One a head group.
  at::Tensor output;  // What the branch norm takes, where several head groups add up to it.

  int64_t bytes() const;
};

// What a layer's mixer keeps: of attention one a sub-batch, of Gated DeltaNet one a segment.
struct MixerParts {
  std::vector<AttentionParts> attention;
  std::vector<DeltaMixerSaved> segments;

  int64_t bytes() const;
  void clear() { *this = {}; }
  bool empty() const { return attention.empty() && segments.empty(); }
};

// Of one layer, between its forward or replay and its backward.
struct LayerSaved {
  MixerParts mixer;
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
                          MixerParts* saved) const;
  at::Tensor BackwardMixer(int64_t layer, const LayerTensors& weights, const at::Tensor& dh,
                           const MixerParts& saved, const PackedBatch& batch,
                           LayerTensors* gradients) const;
  // `replay`: ends at the gate/up product; the result is undefined.
  at::Tensor ForwardMixture(int64_t layer, const LayerTensors& weights, const at::Tensor& h,
                            std::vector<MixtureSaved>* saved, bool replay, RouterStats* stats) const;
  at::Tensor BackwardMixture(int64_t layer, const LayerTensors& weights, const at::Tensor& dy,
                             const std::vector<MixtureSaved>& saved, const LoadBalanceTerm& balance,
                             LayerTensors* gradients) const;

 private:
  std::vector<HeadRange> HeadGroups(const AttentionDescription& attention) const;
  at::Tensor ForwardAttention(const LayerDescription& layer, const LayerTensors& weights, const at::Tensor& x,
                              const PackedBatch& batch, AttentionParts* saved) const;
  at::Tensor BackwardAttention(const LayerDescription& layer, const LayerTensors& weights, const at::Tensor& dh,
                               const AttentionParts& saved, const PackedBatch& batch, LayerTensors* gradients) const;
  at::Tensor ForwardDeltaNet(const LayerDescription& layer, const LayerTensors& weights, const at::Tensor& x,
                             const PackedBatch& batch, std::vector<DeltaMixerSaved>* saved) const;
  at::Tensor BackwardDeltaNet(const LayerDescription& layer, const LayerTensors& weights, const at::Tensor& dh,
                              const std::vector<DeltaMixerSaved>& saved, LayerTensors* gradients) const;

  const ModelDescription* const model_;
  const v1::OperatorPartitions partitions_;
};

}  // namespace oom
