#include "planner/resource_bounds.h"

#include <algorithm>
#include <map>
#include <string>

namespace oom {
namespace {

// A core with 512-bit FMA at 3 GHz does about 100 GFLOP/s in FP32.
constexpr double kCoreFlopsPerSecond = 100e9;
constexpr double kCoreCopyBytesPerSecond = 12e9;
constexpr double kCoreMemoryBytesPerSecond = 16e9;
constexpr double kNodeMemoryBytesPerSecond = 200e9;
constexpr double kGpuFlopsPerSecond = 780e12;
constexpr double kGpuFloat32FlopsPerSecond = 60e12;
constexpr double kPcieBytesPerSecond = 55e9;
// NVLink of Hopper, one direction.
constexpr double kGpuLinkBytesPerSecond = 450e9;

using UnitBytes = std::map<int64_t, int64_t>;  // By unit.

}  // namespace

MachineRates CpuRates(int cpu_count, int worker_threads) {
  return {.compute_flops_per_second = kCoreFlopsPerSecond * std::max(1, worker_threads),
          .copy_bytes_per_second = kCoreCopyBytesPerSecond,
          .collective_bytes_per_second = kCoreCopyBytesPerSecond,
          .collectives_in_host_memory = true,
          .memory_bytes_per_second = std::min(kNodeMemoryBytesPerSecond,
                                              kCoreMemoryBytesPerSecond * std::max(1, cpu_count))};
}

MachineRates CudaRates(int cpu_count, bool float32) {
  MachineRates rates = CpuRates(cpu_count, 1);
  rates.compute_flops_per_second = float32 ? kGpuFloat32FlopsPerSecond : kGpuFlopsPerSecond;
  rates.copy_bytes_per_second = kPcieBytesPerSecond;
  rates.collective_bytes_per_second = kGpuLinkBytesPerSecond;
  rates.collectives_in_host_memory = false;
  return rates;
}

namespace {

// Multiplications and additions of one token forward (models reference, section 8).
struct MixerFlops {
  double linears = 0.0;
  double core = 0.0;  // Scores and values, or the delta rule.
  double core_backward = 0.0;
};

MixerFlops FlopsOf(const AttentionDescription& attention, double hidden, double length) {
  const auto query = static_cast<double>(attention.query_width());
  const auto kv = static_cast<double>(attention.kv_width());
  const auto window = static_cast<double>(attention.sliding_window);
  const double mean_keys = window > 0 && window < length
                               ? (window * (window + 1) / 2 + (length - window) * window) / length
                               : (length + 1) / 2;
  const double projections =
      (attention.output_gate ? 3 : 2) * query + (attention.key_is_value ? 1 : 2) * kv;
  const double scores = 4 * query * mean_keys;
  return {.linears = 2 * hidden * projections, .core = scores, .core_backward = 2.5 * scores};
}

MixerFlops FlopsOf(const DeltaNetDescription& delta, double hidden) {
  constexpr double kChunkTokens = 64;
  const auto key = static_cast<double>(delta.key_head_size);
  const auto value = static_cast<double>(delta.value_head_size);
  const auto heads = static_cast<double>(delta.value_head_count);
  const double rule = heads * (kChunkTokens * (5 * key + 3 * value) + 6 * key * value);
  const auto channels = static_cast<double>(delta.channel_count());
  const auto value_width = static_cast<double>(delta.value_width());
  const double convolution = 2 * channels * static_cast<double>(delta.tap_count);
  return {.linears = 2 * hidden * (channels + 2 * value_width + 2 * heads) + convolution,
          .core = rule,
          .core_backward = 3 * rule};
}

double MixtureFlops(const ModelDescription& model, MixtureKind kind) {
  const auto hidden = static_cast<double>(model.hidden_size);
  double width = 0.0;
  if (HasExperts(kind)) width += static_cast<double>(model.experts_per_token * model.expert_width);
  if (kind == MixtureKind::kRoutedAndShared) width += static_cast<double>(model.shared_width);
  if (kind == MixtureKind::kDense || kind == MixtureKind::kRoutedAndDense) {
    width += static_cast<double>(model.dense_width);
  }
  const double router = HasExperts(kind) ? static_cast<double>(model.expert_count) : 0.0;
  return hidden * (6 * width + 2 * router);
}

MixerFlops MixerFlopsOf(const ModelDescription& model, int64_t layer, int64_t sequence_length) {
  const LayerDescription& description = model.layer(layer);
  const auto hidden = static_cast<double>(model.hidden_size);
  return description.mixer == MixerKind::kDeltaNet
             ? FlopsOf(description.delta_net, hidden)
             : FlopsOf(description.attention, hidden, static_cast<double>(sequence_length));
}

}  // namespace

ReplayFlops TokenReplayFlops(const ModelDescription& model, int64_t layer,
                             int64_t sequence_length) {
  const MixerFlops mixer = MixerFlopsOf(model, layer, sequence_length);
  return {.mixer = mixer.linears + mixer.core,
          .mixture = MixtureFlops(model, model.layer(layer).mixture) * 2 / 3};
}

double StepFlops(const ModelDescription& model, const v1::Plan& plan, const BatchShape& batch) {
  const auto tokens = static_cast<double>(batch.rank_tokens());
  const auto hidden = static_cast<double>(model.hidden_size);
  double flops = 0.0;
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) {
    const MixerFlops mixer = MixerFlopsOf(model, layer, batch.sequence_length);
    const double mixture = MixtureFlops(model, model.layer(layer).mixture);
    const v1::LayerPlan& layer_plan = plan.layers(static_cast<int>(layer));
    const double forward = mixer.linears + mixer.core + mixture;
    const double backward = 2 * (mixer.linears + mixture) + mixer.core_backward;
    const ReplayFlops replay = TokenReplayFlops(model, layer, batch.sequence_length);
    flops += forward + backward + (layer_plan.retain_mixer() ? 0.0 : replay.mixer) +
             (layer_plan.retain_mixture() ? 0.0 : replay.mixture);
  }
  flops += 6 * hidden * static_cast<double>(model.vocabulary_size);
  return flops * tokens;
}

std::vector<v1::ResourceEstimate> BoundResources(const ModelDescription& model,
                                                 const v1::Plan& plan, const SharedLayout& layout,
                                                 const StepGraph& graph, const BatchShape& batch,
                                                 const MachineRates& rates) {
  std::map<Resource, UnitBytes> moved;
  std::map<int, UnitBytes> updated;  // By NUMA node.
  for (const Node& node : graph.nodes) {
    if (node.bytes == 0) continue;
    if (node.kind == NodeKind::kUpdate && node.resource == Resource::kHostOptimizer) {
      updated[layout.chunks()[static_cast<size_t>(node.chunk)].numa_node][node.unit] += node.bytes;
    } else if (node.owner_rank < 0) {
      moved[node.resource][node.unit] += node.bytes;
    }
  }
  std::vector<v1::ResourceEstimate> estimates;
  const auto add = [&](const std::string& name, const UnitBytes& units, double bytes_per_second) {
    v1::ResourceEstimate estimate;
    estimate.set_resource(name);
    for (const auto& [unit, bytes] : units) {
      estimate.set_bytes(estimate.bytes() + bytes);
      v1::UnitBytes* of_unit = estimate.add_units();
      of_unit->set_unit(layout.units()[static_cast<size_t>(unit)].name);
      of_unit->set_bytes(bytes);
    }
    estimate.set_seconds(static_cast<double>(estimate.bytes()) / bytes_per_second);
    estimates.push_back(estimate);
    return estimate.bytes();
  };
  v1::ResourceEstimate compute;
  compute.set_resource("compute of each device");
  compute.set_seconds(StepFlops(model, plan, batch) / rates.compute_flops_per_second);
  estimates.push_back(std::move(compute));
  v1::ResourceEstimate memory;
  memory.set_resource("host memory");
  for (const auto& [resource, units] : moved) {
    const bool collective = resource == Resource::kCollective;
    const int64_t bytes =
        add(std::string(ResourceName(resource)) + " of each device", units,
            collective ? rates.collective_bytes_per_second : rates.copy_bytes_per_second);
    if (collective && !rates.collectives_in_host_memory) continue;
    memory.set_bytes(memory.bytes() + plan.rank_count() * bytes);
  }
  for (const auto& [node, units] : updated) {
    memory.set_bytes(memory.bytes() + add("optimizer of numa " + std::to_string(node), units,
                                          rates.memory_bytes_per_second));
  }
  memory.set_seconds(static_cast<double>(memory.bytes()) / rates.memory_bytes_per_second);
  estimates.push_back(std::move(memory));
  return estimates;
}

}  // namespace oom
