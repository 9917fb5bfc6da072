#include "planner/memory_account.h"

#include <algorithm>
#include <map>
#include <string>

#include "runtime/memory/gpu_scratch.h"
#include "runtime/ops/gpu_limits.h"

namespace oom {
namespace {

// Resident pages of the job host, and of a worker with LibTorch's CPU libraries (their clean,
// shared pages count once over all workers).
constexpr int64_t kJobHostBytes = int64_t{40} << 20;
constexpr int64_t kWorkerBytes = int64_t{120} << 20;
constexpr int64_t kSharedLibraryBytes = int64_t{200} << 20;
// Of a GPU worker: what the driver and its libraries hold in the host's memory.
constexpr int64_t kGpuWorkerBytes = int64_t{900} << 20;
// NCCL's channels to the other GPUs.
constexpr int64_t kCommunicatorBytes = int64_t{512} << 20;

std::string PoolItem(const std::string& name) {
  const std::string kind = name.substr(0, name.find('.'));
  if (kind == "weights") return "weights";
  if (kind == "rest") return "moments and low bits";
  if (kind == "gradients") return "gradients";
  if (kind == "activations") return "boundaries and embedding rows";
  if (kind == "device") return "resident state and its gradients";
  if (kind == "exchange") return "exchanges between ranks";
  return "snapshot of resident state";
}

class Items {
 public:
  void Add(const std::string& space, const std::string& item, int64_t bytes) {
    if (bytes == 0) return;
    for (v1::MemoryEstimate& known : items_) {
      if (known.space() == space && known.item() == item) {
        known.set_bytes(known.bytes() + bytes);
        return;
      }
    }
    v1::MemoryEstimate estimate;
    estimate.set_space(space);
    estimate.set_item(item);
    estimate.set_bytes(bytes);
    items_.push_back(std::move(estimate));
  }
  std::vector<v1::MemoryEstimate> Take() { return std::move(items_); }

 private:
  std::vector<v1::MemoryEstimate> items_;
};

// Bytes of a token through one layer's operators, as they free their temporaries.
struct TokenBytes {
  int64_t saved = 0;
  int64_t backward = 0;  // Temporaries.
};

TokenBytes AttentionTokenBytes(const AttentionDescription& attention, int64_t row, bool gpu,
                               int64_t act) {
  const int64_t query = attention.query_width();
  const int64_t kv = attention.kv_width();
  const int64_t gate = attention.output_gate ? query : 0;
  const int64_t kept_kv = attention.key_is_value ? kv : 2 * kv;
  const int64_t normed_value = attention.value_norm ? kv : 0;
  TokenBytes bytes;
  bytes.saved = row + (2 * query + gate + kept_kv) * act + attention.query_head_count * 4;
  // On a GPU: attention's operands again, their gradients and its result's. Its workspace is beside
  // them.
  bytes.backward = gpu ? (3 * query + 3 * kv + 2 * gate + normed_value) * act
                       : (3 * query + 2 * kv + 2 * gate) * 4 + 3 * row;
  return bytes;
}

TokenBytes DeltaNetTokenBytes(const DeltaNetDescription& delta, int64_t row, bool gpu,
                              int64_t act) {
  const int64_t channels = delta.channel_count();
  const int64_t value = delta.value_width();
  TokenBytes bytes;
  bytes.saved = row + (channels + 2 * value + 2 * delta.value_head_count) * act;
  // The convolution again and its gradient, q and k of unit length and the gradients of q, k, v,
  // the output's.
  bytes.backward = (5 * channels + 3 * value) * 4 + 3 * row;
  // On a GPU, while the rule's backward runs: the normed rows, q and k in FP16, v and the output
  // gate's gradient in BF16, the gradients of q, k, v and of the rule's output wide, beta and decay
  // with theirs. Its workspace is beside them.
  if (gpu) {
    bytes.backward = row + 2 * delta.key_width() * (2 + 4) + value * (2 + 2 + 4 + 4) +
                     4 * delta.value_head_count * 4;
  }
  return bytes;
}

TokenBytes MixerTokenBytes(const LayerDescription& layer, int64_t row, bool gpu, int64_t act) {
  return layer.mixer == MixerKind::kDeltaNet ? DeltaNetTokenBytes(layer.delta_net, row, gpu, act)
                                             : AttentionTokenBytes(layer.attention, row, gpu, act);
}

// Of attention's backward on a GPU. cuDNN sums the gradients of the query and of shared keys and
// values in FP32 and works in parts, whose results are copied; FlashAttention takes packed
// documents at once: the query in FP32, its heads' keys and values in BF16. Wide heads go by
// blocks.
int64_t AttentionWorkspaceBytes(const AttentionDescription& attention, int64_t tokens) {
  if (attention.head_size > kFusedHeadSizeMax) {
    return WideHeadAttentionBackwardScratchBytes({.tokens = tokens,
                                                  .query_heads = attention.query_head_count,
                                                  .kv_heads = attention.kv_head_count,
                                                  .head_size = attention.head_size});
  }
  const int64_t query = attention.query_width();
  const int64_t kv = attention.kv_width();
  const int64_t part = std::min(tokens, kCudnnBackwardTokens);
  const int64_t results = part < tokens ? part * (query + 2 * kv) * 2 : 0;
  return std::max(part * query * 12 + results, tokens * query * 8);
}

// Every document begins a chunk of the delta rule, and every 64 tokens do: what documents of this
// many tokens, on average, need.
constexpr int64_t kChunkTokens = 64;
constexpr int64_t kShortDocumentTokens = 256;

int64_t DeltaNetWorkspaceBytes(const DeltaNetDescription& delta, int64_t tokens) {
  const int64_t chunks = tokens / kChunkTokens + tokens / kShortDocumentTokens + 2;
  return GatedDeltaRuleBackwardBytes(chunks, delta.value_head_count);
}

// What a mixer's backward takes at most. Gated DeltaNet's temporaries are of one segment.
int64_t MixerBackwardBytes(const LayerDescription& layer, const TokenBytes& mixer, int64_t tokens,
                           int64_t segment_tokens, bool gpu) {
  if (layer.mixer == MixerKind::kDeltaNet) {
    const int64_t at_once = segment_tokens > 0 ? std::min(tokens, segment_tokens) : tokens;
    return at_once * mixer.backward + (gpu ? DeltaNetWorkspaceBytes(layer.delta_net, at_once) : 0);
  }
  return tokens * mixer.backward + (gpu ? AttentionWorkspaceBytes(layer.attention, tokens) : 0);
}

// Of the mixture's rows: the experts that each token has, and those that all tokens have.
struct MixtureRows {
  int64_t routed = 0;
  int64_t shared_width = 0;  // Of all tokens' MLPs together.
};

MixtureRows RowsOf(const ModelDescription& model, MixtureKind kind, int64_t tokens) {
  MixtureRows rows;
  if (HasExperts(kind)) rows.routed = tokens * model.experts_per_token;
  if (kind == MixtureKind::kDense || kind == MixtureKind::kRoutedAndDense)
    rows.shared_width += model.dense_width;
  if (kind == MixtureKind::kRoutedAndShared) rows.shared_width += model.shared_width;
  return rows;
}

}  // namespace

int64_t OperatorBytes(const ModelDescription& model, const v1::Plan& plan, const BatchShape& batch,
                      bool float32) {
  const int64_t tokens = batch.micro_batch_tokens();
  const int64_t act = float32 ? 4 : 2;
  // In FP32 a GPU runs the composite operators too.
  const bool gpu = plan.cuda_devices() && !float32;
  const int64_t row = model.hidden_size * act;
  const int64_t row_bytes = tokens * row;

  const auto mixture_saved = [&](MixtureKind kind, int64_t chunk_tokens) {
    const MixtureRows rows = RowsOf(model, kind, chunk_tokens);
    const int64_t routed = HasExperts(kind)
                               ? rows.routed * (2 * model.expert_width * act + (gpu ? 20 : 36)) +
                                     chunk_tokens * model.expert_count * act
                               : 0;
    return chunk_tokens * (row + 2 * rows.shared_width * act) + routed;
  };
  // Backward: the rows and their gradient, the activation and its gradient, the gate/up gradient;
  // on a GPU each is freed at its last use.
  const auto mixture_backward = [&](MixtureKind kind, int64_t chunk_tokens) {
    const MixtureRows rows = RowsOf(model, kind, chunk_tokens);
    const auto of = [&](int64_t count, int64_t width) {
      return count * (2 * model.hidden_size * act + width * (gpu ? act : 16));
    };
    // One after the other; what the first gives waits, wide.
    const int64_t shared = rows.shared_width > 0 ? of(chunk_tokens, rows.shared_width) : 0;
    const int64_t routed = of(rows.routed, model.expert_width);
    return std::max(shared, routed) +
           (shared > 0 && rows.routed > 0 ? chunk_tokens * model.hidden_size * 4 : 0);
  };
  const int64_t chunk = plan.partitions().mixture_chunk_tokens() > 0
                            ? std::min(tokens, plan.partitions().mixture_chunk_tokens())
                            : tokens;
  int64_t kept = 0;
  int64_t largest_layer = 0;
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) {
    const v1::LayerPlan& layer_plan = plan.layers(static_cast<int>(layer));
    const LayerDescription& description = model.layer(layer);
    const MixtureKind kind = description.mixture;
    const TokenBytes mixer = MixerTokenBytes(description, row, gpu, act);
    const int64_t mixer_saved = tokens * mixer.saved;
    if (layer_plan.boundary() == v1::BOUNDARY_HOME_DEVICE && !layer_plan.retain_mixer())
      kept += row_bytes;
    if (layer_plan.retain_mixer()) kept += mixer_saved;
    if (layer_plan.retain_mixture()) kept += mixture_saved(kind, tokens);
    const int64_t mixer_work =
        mixer_saved + (gpu ? row_bytes : 0) +
        MixerBackwardBytes(description, mixer, tokens, plan.partitions().recurrent_segment_tokens(),
                           gpu);
    const int64_t mixture_work = mixture_saved(kind, tokens) + mixture_backward(kind, chunk);
    largest_layer = std::max(largest_layer, mixer_saved + mixture_work + 3 * row_bytes);
    largest_layer = std::max(largest_layer, mixer_work);
  }
  const int64_t head_chunk = plan.partitions().head_chunk_tokens() > 0
                                 ? std::min(tokens, plan.partitions().head_chunk_tokens())
                                 : tokens;
  // The composite operators have log-probabilities beside the logits.
  const int64_t head = head_chunk * model.vocabulary_size * (gpu ? act : 4 + act) + 4 * row_bytes;
  // The embedding's backward takes all micro-batches at once: their upstream gradients wait for it,
  // then lie in a row.
  const int64_t waiting = (plan.accumulation() - 1) * row_bytes;
  const int64_t embedding = plan.accumulation() > 1 ? (plan.accumulation() + 1) * row_bytes : 0;
  return kept + waiting + std::max({largest_layer, head, embedding});
}

MemoryAccount AccountMemory(const ModelDescription& model, const v1::Plan& plan,
                            const SharedLayout& layout, const StepGraph& graph,
                            const BatchShape& batch, int numa_node_count) {
  MemoryAccount account;
  Items items;
  account.host_bytes_by_node.assign(static_cast<size_t>(std::max(1, numa_node_count)), 0);
  const auto host = [&](int node, const std::string& item, int64_t bytes) {
    items.Add("numa " + std::to_string(node), item, bytes);
    account.host_bytes += bytes;
    account.host_bytes_by_node[static_cast<size_t>(node)] += bytes;
  };
  const int ranks = plan.rank_count();
  std::vector<int64_t> device(static_cast<size_t>(ranks), 0);
  const auto on_device = [&](int rank, const std::string& item, int64_t bytes) {
    items.Add("device " + std::to_string(rank), item, bytes);
    device[static_cast<size_t>(rank)] += bytes;
    if (plan.cuda_devices()) return;
    const int node = rank < plan.rank_numa_node_size() ? plan.rank_numa_node(rank) : 0;
    account.host_bytes += bytes;
    account.host_bytes_by_node[static_cast<size_t>(node)] += bytes;
  };
  for (const PoolSpec& pool : layout.pools()) {
    const std::string item = PoolItem(pool.name);
    if (pool.name.rfind("device.", 0) == 0) {
      const int rank = std::stoi(pool.name.substr(7));
      on_device(rank, item, pool.bytes);
    } else {
      host(pool.numa_node, item, pool.bytes);
    }
  }
  std::map<std::string, int64_t> buffers;
  for (const Buffer& buffer : graph.buffers) {
    if (buffer.space != Space::kDevice || buffer.bytes == 0) continue;
    const bool window = buffer.name.rfind("window.", 0) == 0;
    const bool gradient = buffer.name.rfind("gradient.", 0) == 0;
    buffers[window     ? "parameter windows"
            : gradient ? "gradient buffers"
                       : "boundary buffers"] += buffer.bytes;
  }
  const int64_t operators = OperatorBytes(model, plan, batch, layout.float32());
  for (int rank = 0; rank < ranks; ++rank) {
    for (const auto& [item, bytes] : buffers) on_device(rank, item, bytes);
    on_device(rank, "operators and kept activations", operators);
    if (!plan.cuda_devices()) continue;
    on_device(rank, "data plane", GpuScratchOf(layout, rank).sum());
    on_device(rank, "context and libraries", kGpuContextBytes + kGpuLibraryGrowthBytes);
    if (layout.exchanges()) on_device(rank, "communicator", kCommunicatorBytes);
  }
  host(0, "snapshot staging", plan.snapshot_staging_bytes());
  host(0, "processes",
       kJobHostBytes + kSharedLibraryBytes +
           ranks * (plan.cuda_devices() ? kGpuWorkerBytes : kWorkerBytes));
  account.device_bytes = *std::max_element(device.begin(), device.end());
  account.checkpoint_bytes = 12 * ParameterCount(layout.units());

  // What clipping and accumulation keep: every streamed gradient, where overlapped updates need a
  // backlog.
  int64_t streamed = 0;
  for (const Chunk& chunk : layout.chunks()) {
    if (chunk.owner_rank < 0) streamed += chunk.elements;
  }
  const int64_t kept = streamed * layout.gradient_bytes() * ranks;
  account.deferred_extra_bytes = std::max<int64_t>(0, kept - plan.backlog_bytes() * ranks);
  account.items = items.Take();
  return account;
}

}  // namespace oom
