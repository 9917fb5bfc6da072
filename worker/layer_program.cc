#include "worker/layer_program.h"

#include <algorithm>
#include <utility>

#include "runtime/graph/head_groups.h"
#include "runtime/ops/delta_mixer.h"
#include "runtime/ops/precision.h"

namespace oom {

int64_t AttentionParts::bytes() const {
  int64_t sum = TensorBytes(output);
  for (const MixerSaved& part : heads) sum += part.bytes();
  return sum;
}

int64_t MixerParts::bytes() const {
  int64_t sum = 0;
  for (const AttentionParts& part : attention) sum += part.bytes();
  for (const DeltaMixerSaved& part : segments) sum += part.bytes();
  return sum;
}

int64_t LayerSaved::bytes() const {
  int64_t sum = mixer.bytes() + TensorBytes(mixer_output);
  for (const MixtureSaved& part : mixture) sum += part.bytes();
  return sum;
}

namespace {

// [0, tokens) in parts of `most`; with 0 in one.
std::vector<TokenRange> PartsOf(int64_t tokens, int64_t most) {
  std::vector<TokenRange> parts;
  const int64_t step = most > 0 ? most : tokens;
  for (int64_t first = 0; first < tokens; first += step) {
    parts.push_back({.first = first, .count = std::min(step, tokens - first)});
  }
  return parts;
}

at::Tensor Joined(const std::vector<at::Tensor>& parts) {
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

}  // namespace

LayerProgram::LayerProgram(const ModelDescription* model, const v1::OperatorPartitions& partitions)
    : model_(model),
      partitions_(partitions) {}

std::vector<HeadRange> LayerProgram::HeadGroups(const AttentionDescription& attention) const {
  const int64_t kv_heads = attention.kv_head_count;
  const int64_t per_kv_head = attention.query_head_count / kv_heads;
  const int64_t groups = HeadGroupCount(partitions_, attention);
  std::vector<HeadRange> ranges;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = kv_heads * g / groups;
    const int64_t end = kv_heads * (g + 1) / groups;
    ranges.push_back({.first = first * per_kv_head, .count = (end - first) * per_kv_head});
  }
  return ranges;
}

at::Tensor LayerProgram::ForwardMixer(int64_t layer, const LayerTensors& weights,
                                      const at::Tensor& x, const PackedBatch& batch,
                                      MixerParts* saved) const {
  const LayerDescription& description = model_->layer(layer);
  if (description.mixer == MixerKind::kDeltaNet) {
    return ForwardDeltaNet(description, weights, x, batch,
                           saved == nullptr ? nullptr : &saved->segments);
  }
  if (saved != nullptr) saved->attention.clear();
  std::vector<at::Tensor> parts;
  for (const TokenRange& tokens : PartsOf(x.size(0), partitions_.attention_sub_batch_tokens())) {
    AttentionParts* const kept = saved == nullptr ? nullptr : &saved->attention.emplace_back();
    if (kept != nullptr) kept->tokens = tokens;
    parts.push_back(ForwardAttention(description, weights, x.narrow(0, tokens.first, tokens.count),
                                     PartOfBatch(batch, tokens.first, tokens.count), kept));
  }
  return Joined(parts);
}

at::Tensor LayerProgram::ForwardAttention(const LayerDescription& layer,
                                          const LayerTensors& weights, const at::Tensor& x,
                                          const PackedBatch& batch, AttentionParts* saved) const {
  const std::vector<HeadRange> groups = HeadGroups(layer.attention);
  if (saved != nullptr) saved->heads.assign(groups.size(), {});
  if (groups.size() == 1) {
    return MixerForward(*model_, layer, weights, x, batch,
                        saved == nullptr ? nullptr : &saved->heads.front());
  }
  at::Tensor sum;
  for (size_t g = 0; g < groups.size(); ++g) {
    const at::Tensor part = MixerForward(*model_, layer, weights, x, batch,
                                         saved == nullptr ? nullptr : &saved->heads[g], groups[g]);
    sum = sum.defined() ? sum.add_(part) : part;
  }
  return FinishMixer(*model_, weights, x, sum, saved == nullptr ? nullptr : &saved->output);
}

at::Tensor LayerProgram::BackwardMixer(int64_t layer, const LayerTensors& weights,
                                       const at::Tensor& dh, const MixerParts& saved,
                                       const PackedBatch& batch, LayerTensors* gradients) const {
  const LayerDescription& description = model_->layer(layer);
  if (description.mixer == MixerKind::kDeltaNet) {
    return BackwardDeltaNet(description, weights, dh, saved.segments, gradients);
  }
  std::vector<at::Tensor> parts;
  for (const AttentionParts& part : saved.attention) {
    const auto [first, count] = part.tokens;
    parts.push_back(BackwardAttention(description, weights, dh.narrow(0, first, count), part,
                                      PartOfBatch(batch, first, count), gradients));
  }
  return Joined(parts);
}

at::Tensor LayerProgram::BackwardAttention(const LayerDescription& layer,
                                           const LayerTensors& weights, const at::Tensor& dh,
                                           const AttentionParts& saved, const PackedBatch& batch,
                                           LayerTensors* gradients) const {
  if (saved.heads.size() == 1) {
    return MixerBackward(*model_, layer, weights, dh, saved.heads.front(), batch, gradients);
  }
  const at::Tensor doutput = BeginMixerBackward(*model_, weights, dh, saved.output, gradients);
  at::Tensor sum;
  for (const MixerSaved& of_part : saved.heads) {
    const at::Tensor part = MixerBackward(*model_, layer, weights, doutput, of_part, batch, gradients);
    sum = sum.defined() ? sum.add_(part) : part;
  }
  return AddResidual(dh, sum);
}

// Segment after segment, each with what the one before hands on.
at::Tensor LayerProgram::ForwardDeltaNet(const LayerDescription& layer, const LayerTensors& weights,
                                         const at::Tensor& x, const PackedBatch& batch,
                                         std::vector<DeltaMixerSaved>* saved) const {
  const int64_t tokens = x.size(0);
  const int64_t segment_tokens = partitions_.recurrent_segment_tokens();
  const int64_t most = segment_tokens > 0 ? segment_tokens : tokens;
  if (saved != nullptr) saved->clear();
  std::vector<at::Tensor> parts;
  GatedDeltaNetState state;
  for (int64_t first = 0; first < tokens; first += most) {
    const SequenceSegment segment = CutSegment(batch.cu_seqlens, batch.document_starts, first,
                                               std::min(first + most, tokens));
    DeltaMixerOutput output =
        DeltaMixerForward(*model_, layer, weights, x, segment, state,
                          saved == nullptr ? nullptr : &saved->emplace_back());
    parts.push_back(std::move(output.h_TH));
    state = std::move(output.state);
  }
  return Joined(parts);
}

at::Tensor LayerProgram::BackwardDeltaNet(const LayerDescription& layer,
                                          const LayerTensors& weights, const at::Tensor& dh,
                                          const std::vector<DeltaMixerSaved>& saved,
                                          LayerTensors* gradients) const {
  std::vector<at::Tensor> parts(saved.size());
  GatedDeltaNetState dstate;
  for (size_t i = saved.size(); i-- > 0;) {
    DeltaMixerGradients of_part =
        DeltaMixerBackward(*model_, layer, weights, dh, dstate, saved[i], gradients);
    parts[i] = std::move(of_part.x_TH);
    dstate = std::move(of_part.state);
  }
  return Joined(parts);
}

at::Tensor LayerProgram::ForwardMixture(int64_t layer, const LayerTensors& weights,
                                        const at::Tensor& h, std::vector<MixtureSaved>* saved,
                                        bool replay, RouterStats* stats) const {
  const LayerDescription& description = model_->layer(layer);
  const std::vector<TokenRange> chunks = PartsOf(h.size(0), partitions_.mixture_chunk_tokens());
  if (saved != nullptr) saved->assign(chunks.size(), {});
  std::vector<at::Tensor> parts;
  for (size_t c = 0; c < chunks.size(); ++c) {
    parts.push_back(MixtureForward(
        *model_, description, weights, h, saved == nullptr ? nullptr : &(*saved)[c],
        {.stop_at_gate_up = replay, .tokens = chunks[c], .stats = stats}));
  }
  if (replay) return {};
  return Joined(parts);
}

at::Tensor LayerProgram::BackwardMixture(int64_t layer, const LayerTensors& weights,
                                         const at::Tensor& dy,
                                         const std::vector<MixtureSaved>& saved,
                                         const LoadBalanceTerm& balance,
                                         LayerTensors* gradients) const {
  const LayerDescription& description = model_->layer(layer);
  std::vector<at::Tensor> parts;
  for (const MixtureSaved& part : saved) {
    parts.push_back(MixtureBackward(*model_, description, weights, dy, part, gradients, balance));
  }
  return Joined(parts);
}

}  // namespace oom
