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
          .memory_bytes_per_second = std::min(
              kNodeMemoryBytesPerSecond, kCoreMemoryBytesPerSecond * std::max(1, cpu_count))};
}

MachineRates CudaRates(int cpu_count, bool float32) {
  MachineRates rates = CpuRates(cpu_count, 1);
  rates.compute_flops_per_second = float32 ? kGpuFloat32FlopsPerSecond : kGpuFlopsPerSecond;
  rates.copy_bytes_per_second = kPcieBytesPerSecond;
  rates.collective_bytes_per_second = kGpuLinkBytesPerSecond;
  rates.collectives_in_host_memory = false;
  return rates;
}

double StepFlops(const ModelDescription& model, const v1::Plan& plan, const BatchShape& batch) {
  const auto tokens = static_cast<double>(batch.rank_tokens());
  const auto hidden = static_cast<double>(model.hidden_size);
  const auto query = static_cast<double>(model.query_head_count * model.head_size);
  const auto kv = static_cast<double>(model.kv_head_count * model.head_size);
  const auto length = static_cast<double>(batch.sequence_length);
  const auto window = static_cast<double>(model.sliding_window);
  const double mean_keys =
      window > 0 && window < length
          ? (window * (window + 1) / 2 + (length - window) * window) / length
          : (length + 1) / 2;
  const double linears = 2 * hidden * (2 * query + 2 * kv);
  const double scores = 4 * query * mean_keys;
  double flops = 0.0;
  for (size_t layer = 0; layer < model.mixtures.size(); ++layer) {
    const bool dense = model.mixtures[layer] == MixtureKind::kDense;
    const double mixture =
        dense ? 6 * hidden * static_cast<double>(model.dense_width)
              : 6 * hidden * static_cast<double>(model.experts_per_token * model.expert_width) +
                    2 * hidden * static_cast<double>(model.expert_count);
    const v1::LayerPlan& layer_plan = plan.layers(static_cast<int>(layer));
    const double forward = linears + scores + mixture;
    const double backward = 2 * (linears + mixture) + 2.5 * scores;
    // Replay ends at the gate/up product: two thirds of the mixture.
    const double replay = (layer_plan.retain_mixer() ? 0.0 : linears + scores) +
                          (layer_plan.retain_mixture() ? 0.0 : mixture * 2 / 3);
    flops += forward + backward + replay;
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
    const int64_t bytes = add(
        std::string(ResourceName(resource)) + " of each device", units,
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
