#include "planner/workspace_fit.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace oom {
namespace {

// Below these a part's products no longer fill a GPU.
constexpr int64_t kSmallestMixtureChunkTokens = 2048;
constexpr int64_t kSmallestHeadChunkTokens = 1024;
constexpr int64_t kSmallestSegmentTokens = 4096;
constexpr int64_t kSmallestSubBatchTokens = 4096;
// A Gated DeltaNet segment is whole chunks of the delta rule.
constexpr int64_t kSegmentGrain = 64;

using Change = std::function<bool(v1::Plan*)>;  // False: there is nothing left to change.

// Half of a part of `value` tokens, or of all where it is 0; 0: it is as small as it gets.
int64_t Halved(int64_t value, int64_t all, int64_t smallest, int64_t grain) {
  const int64_t tokens = value > 0 ? std::min(value, all) : all;
  const int64_t half = (tokens / 2 + grain - 1) / grain * grain;
  return half >= smallest && half < tokens ? half : 0;
}

int64_t MostHeadGroups(const ModelDescription& model) {
  int64_t most = 1;
  for (const LayerDescription& layer : model.layers) {
    if (layer.mixer == MixerKind::kAttention) most = std::max(most, layer.attention.kv_head_count);
  }
  return most;
}

bool HasDeltaNet(const ModelDescription& model) {
  return std::any_of(model.layers.begin(), model.layers.end(),
                     [](const LayerDescription& layer) { return layer.mixer == MixerKind::kDeltaNet; });
}

// Parts of operators: more launches, smaller products.
std::vector<Change> Parts(const ModelDescription& model, int64_t sequence_length) {
  std::vector<Change> changes;
  changes.push_back([](v1::Plan* plan) {
    v1::OperatorPartitions* parts = plan->mutable_partitions();
    const int64_t half = Halved(parts->mixture_chunk_tokens(), plan->micro_batch_tokens(),
                                kSmallestMixtureChunkTokens, 1);
    if (half > 0) parts->set_mixture_chunk_tokens(half);
    return half > 0;
  });
  changes.push_back([](v1::Plan* plan) {
    v1::OperatorPartitions* parts = plan->mutable_partitions();
    const int64_t half =
        Halved(parts->head_chunk_tokens(), plan->micro_batch_tokens(), kSmallestHeadChunkTokens, 1);
    if (half > 0) parts->set_head_chunk_tokens(half);
    return half > 0;
  });
  if (HasDeltaNet(model)) {
    changes.push_back([](v1::Plan* plan) {
      v1::OperatorPartitions* parts = plan->mutable_partitions();
      const int64_t half = Halved(parts->recurrent_segment_tokens(), plan->micro_batch_tokens(),
                                  kSmallestSegmentTokens, kSegmentGrain);
      if (half > 0) parts->set_recurrent_segment_tokens(half);
      return half > 0;
    });
  }
  changes.push_back([sequence_length](v1::Plan* plan) {
    v1::OperatorPartitions* parts = plan->mutable_partitions();
    const int64_t half = Halved(parts->attention_sub_batch_tokens(), plan->micro_batch_tokens(),
                                std::max(sequence_length, kSmallestSubBatchTokens), sequence_length);
    if (half > 0) parts->set_attention_sub_batch_tokens(half);
    return half > 0;
  });
  changes.push_back([most = MostHeadGroups(model)](v1::Plan* plan) {
    v1::OperatorPartitions* parts = plan->mutable_partitions();
    const int64_t groups = std::max(1, parts->attention_head_group_count());
    if (2 * groups > most) return false;
    parts->set_attention_head_group_count(static_cast<int32_t>(2 * groups));
    return true;
  });
  return changes;
}

// Buffers: what they hide is exposed.
std::vector<Change> Buffers() {
  return {[](v1::Plan* plan) {
            if (plan->gradient_buffer_count() <= 1) return false;
            plan->set_gradient_buffer_count(1);
            return true;
          },
          [](v1::Plan* plan) {
            if (plan->window_count() <= 1) return false;
            plan->set_window_count(1);
            return true;
          }};
}

// The change that saves most, or all of them together where each alone saves nothing (the largest of several needs
// counts). Nothing: none saves.
std::optional<v1::Plan> Best(const std::vector<Change>& changes, const v1::Plan& plan,
                             const std::function<int64_t(const v1::Plan&)>& device_bytes) {
  int64_t least = device_bytes(plan);
  std::optional<v1::Plan> best;
  const auto consider = [&](const v1::Plan& candidate) {
    const int64_t bytes = device_bytes(candidate);
    if (bytes >= least) return;
    least = bytes;
    best = candidate;
  };
  v1::Plan all = plan;
  for (const Change& change : changes) {
    v1::Plan candidate = plan;
    if (!change(&candidate)) continue;
    consider(candidate);
    change(&all);
  }
  if (!best) consider(all);
  return best;
}

}  // namespace

void FitWorkspace(const ModelDescription& model, int64_t sequence_length,
                  const std::function<int64_t(const v1::Plan&)>& device_bytes, int64_t budget_bytes, v1::Plan* plan) {
  for (const std::vector<Change>& changes : {Parts(model, sequence_length), Buffers()}) {
    while (device_bytes(*plan) > budget_bytes) {
      std::optional<v1::Plan> smaller = Best(changes, *plan, device_bytes);
      if (!smaller) break;
      *plan = std::move(*smaller);
    }
  }
}

}  // namespace oom
