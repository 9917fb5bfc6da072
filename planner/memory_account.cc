#include "planner/memory_account.h"

#include <algorithm>
#include <map>
#include <string>

#include "runtime/graph/boundary_schedule.h"
#include "runtime/graph/head_groups.h"
#include "runtime/memory/gpu_scratch.h"
#include "runtime/ops/gpu_kernels.h"
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
  // them. The composite operators have the gradients of the rotated and of the normed query too,
  // and the norm's backward two products.
  const int64_t queries = attention.query_key_norm ? 7 : 5;
  bytes.backward = gpu ? (3 * query + 3 * kv + 2 * gate + normed_value) * act
                       : (queries * query + 2 * kv + 2 * gate) * 4 + 3 * row;
  return bytes;
}

TokenBytes DeltaNetTokenBytes(const DeltaNetDescription& delta, int64_t row, bool gpu,
                              int64_t act) {
  const int64_t channels = delta.channel_count();
  const int64_t value = delta.value_width();
  TokenBytes bytes;
  bytes.saved = row + (channels + 2 * value + 2 * delta.value_head_count) * act;
  // The convolution again and its gradient, q and k of unit length, the gradients of the output and
  // of its gate; the gradients of q, k, v and the rule's products wide.
  bytes.backward = (2 * channels + 4 * value) * act + (3 * channels + 2 * value) * 4;
  // On a GPU, while the rule's backward runs: the normed rows, q and k in FP16, v and the output
  // gate's gradient in BF16, the gradients of q, k, v and of the rule's output wide, beta and decay
  // with theirs. Its workspace is beside them.
  if (gpu) {
    bytes.backward = row + 2 * delta.key_width() * (2 + 4) + value * (2 + 2 + 4 + 4) +
                     4 * delta.value_head_count * 4;
  }
  return bytes;
}

TokenBytes MixerTokenBytes(const ModelDescription& model, const LayerDescription& layer,
                           int64_t row, bool gpu, int64_t act) {
  TokenBytes bytes = layer.mixer == MixerKind::kDeltaNet
                         ? DeltaNetTokenBytes(layer.delta_net, row, gpu, act)
                         : AttentionTokenBytes(layer.attention, row, gpu, act);
  // What the branch norm takes.
  if (model.branch_norms) bytes.saved += row;
  return bytes;
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

// What a mixer's backward takes at most beside what was kept: of one part, and the sum over parts.
int64_t MixerBackwardBytes(const ModelDescription& model, const LayerDescription& layer,
                           const v1::Plan& plan, int64_t tokens, int64_t row, bool gpu,
                           int64_t act) {
  const TokenBytes token = MixerTokenBytes(model, layer, row, gpu, act);
  const int64_t result = gpu ? tokens * row : 0;
  if (layer.mixer == MixerKind::kDeltaNet) {
    const int64_t segment = plan.partitions().recurrent_segment_tokens();
    const int64_t at_once = segment > 0 ? std::min(segment, tokens) : tokens;
    return at_once * token.backward + result +
           (gpu ? DeltaNetWorkspaceBytes(layer.delta_net, at_once) : 0);
  }
  const int64_t groups = HeadGroupCount(plan.partitions(), layer.attention);
  const int64_t sub_batch = plan.partitions().attention_sub_batch_tokens();
  const int64_t at_once = sub_batch > 0 ? std::min(sub_batch, tokens) : tokens;
  const int64_t sum = groups > 1 ? 2 * at_once * (row / act) * 4 : 0;
  // The gradient of what the branch norm takes, which all parts read.
  const int64_t branch = model.branch_norms ? at_once * row : 0;
  const int64_t workspace = gpu ? AttentionWorkspaceBytes(layer.attention, at_once) : 0;
  return (at_once * token.backward + workspace) / groups + sum + branch + result;
}

// Attention written out by blocks (runtime/ops/blocked_attention.h), which only devices without a
// fused kernel for it need: probabilities, their gradient and a product.
int64_t CompositeScoreBytes(const LayerDescription& layer, const v1::Plan& plan,
                            const BatchShape& batch, bool on_gpu_kernels) {
  if (!plan.cuda_devices() || on_gpu_kernels || layer.mixer != MixerKind::kAttention) return 0;
  const int64_t scores =
      batch.micro_batch_tokens() * layer.attention.query_head_count * batch.sequence_length;
  return 3 * std::min(scores, kBlockedAttentionElements) * 4;
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
  const bool kernels = plan.cuda_devices() && !float32;
  const int64_t row = model.hidden_size * act;
  const int64_t row_bytes = tokens * row;

  const auto mixture_saved = [&](MixtureKind kind, bool gpu, int64_t chunk_tokens) {
    const MixtureRows rows = RowsOf(model, kind, chunk_tokens);
    const int64_t routed = HasExperts(kind)
                               ? rows.routed * (2 * model.expert_width * act + (gpu ? 20 : 36)) +
                                     chunk_tokens * model.expert_count * act
                               : 0;
    return chunk_tokens * (row + 2 * rows.shared_width * act) + routed;
  };
  // Backward: the rows and their gradient, the activation and its gradient, the gate/up gradient;
  // on a GPU each is freed at its last use.
  const auto mixture_backward = [&](MixtureKind kind, bool gpu, int64_t chunk_tokens) {
    const MixtureRows rows = RowsOf(model, kind, chunk_tokens);
    const auto of = [&](int64_t count, int64_t width) {
      return count * (2 * model.hidden_size * act + width * (gpu ? act : 16));
    };
    // One after the other; what the first gives waits, wide.
    const int64_t shared = rows.shared_width > 0 ? of(chunk_tokens, rows.shared_width) : 0;
    const int64_t routed = of(rows.routed, model.expert_width);
    const int64_t wide_row = chunk_tokens * model.hidden_size * 4;
    const int64_t both = shared > 0 && rows.routed > 0 ? wide_row : 0;
    // Between norms: what both branches give and their sum, the gradients of each and of the
    // result. On a GPU, while the experts' backward runs: the gradients of both branches and of the
    // result, the normed rows; by expert row the weight and the scale that make the combine's,
    // that, its gradient.
    int64_t between = 0;
    if (kind == MixtureKind::kRoutedAndDense) {
      between =
          gpu ? 4 * chunk_tokens * row + rows.routed * 4 * 4 : 6 * chunk_tokens * row + wide_row;
    }
    return std::max(shared, routed) + both + between;
  };
  const int64_t chunk = plan.partitions().mixture_chunk_tokens() > 0
                            ? std::min(tokens, plan.partitions().mixture_chunk_tokens())
                            : tokens;
  // Places of inputs on their way back, where no buffer of the plan has them: the layer's own is in
  // what it keeps.
  const BoundarySchedule boundaries(model, plan);
  const int64_t coming_back =
      boundaries.taken_on_demand() ? plan.boundary_buffer_count() * row_bytes : 0;
  const int64_t next_coming_back = boundaries.taken_on_demand() ? coming_back - row_bytes : 0;
  // Below a layer and of it, what waits for backward; with what its backward takes beside that, the most that there is
  // at a time. Layers above are done by then.
  int64_t kept = 0;
  int64_t largest_layer = 0;
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) {
    const v1::LayerPlan& layer_plan = plan.layers(static_cast<int>(layer));
    const LayerDescription& description = model.layer(layer);
    const MixtureKind kind = description.mixture;
    const bool mixer_on_gpu = kernels && GpuKernelsServeMixer(description);
    const bool mixture_on_gpu = kernels && GpuKernelsServeMixture(model, description);
    const TokenBytes mixer = MixerTokenBytes(model, description, row, mixer_on_gpu, act);
    const int64_t mixer_saved = tokens * mixer.saved;
    const int64_t mixture_bytes = mixture_saved(kind, mixture_on_gpu, tokens);
    const bool keeps_mixer = layer_plan.retain_mixer();
    const bool keeps_mixture = layer_plan.retain_mixture();
    if (layer_plan.boundary() == v1::BOUNDARY_HOME_DEVICE && !keeps_mixer) kept += row_bytes;
    if (keeps_mixer) kept += mixer_saved;
    // What the mixture is replayed from.
    if (keeps_mixer && !keeps_mixture) kept += row_bytes;
    const int64_t replayed_mixer = keeps_mixer ? 0 : mixer_saved;
    const int64_t mixer_work =
        replayed_mixer + CompositeScoreBytes(description, plan, batch, mixer_on_gpu) +
        MixerBackwardBytes(model, description, plan, tokens, row, mixer_on_gpu, act);
    const bool waits_for_groups = RunsInHeadGroups(plan.partitions(), description);
    largest_layer =
        std::max(largest_layer, kept + mixer_work + (waits_for_groups ? 0 : next_coming_back));
    const int64_t mixture_work = mixture_bytes + mixture_backward(kind, mixture_on_gpu, chunk);
    largest_layer = std::max(
        largest_layer, kept + replayed_mixer + mixture_work + 3 * row_bytes + next_coming_back);
    if (keeps_mixture) kept += mixture_bytes;
  }
  const int64_t head_chunk = plan.partitions().head_chunk_tokens() > 0
                                 ? std::min(tokens, plan.partitions().head_chunk_tokens())
                                 : tokens;
  // The composite operators have log-probabilities beside the logits; beside capped ones, which are
  // wide, what their derivative is of.
  const int64_t logit_bytes = kernels ? act : model.logit_cap == 0.0 ? 4 + act : 12;
  const int64_t head =
      head_chunk * model.vocabulary_size * logit_bytes + 4 * row_bytes + coming_back;
  // The embedding's backward takes all micro-batches at once: their upstream gradients wait for it,
  // then lie in a row.
  const int64_t waiting = (plan.accumulation() - 1) * row_bytes;
  const int64_t embedding = plan.accumulation() > 1 ? (plan.accumulation() + 1) * row_bytes : 0;
  return waiting + std::max({largest_layer, kept + head, embedding});
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
