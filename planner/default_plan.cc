#include "planner/default_plan.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "planner/job_settings.h"
#include "planner/kept_activations.h"
#include "planner/memory_account.h"
#include "planner/workspace_fit.h"
#include "runtime/base/units.h"
#include "runtime/graph/graph_builder.h"
#include "runtime/model/unit.h"

namespace oom {
namespace {

constexpr int64_t kLargestChunkBytes = 32_MiB;
constexpr int64_t kSmallestChunkBytes = 1_MiB;
constexpr int64_t kBacklogBytes = 1_GiB;
// Behind a GPU's backward the host's updates pile up; with this much room the gradients do not wait for them.
constexpr int64_t kLargestBacklogBytes = 6_GiB;
constexpr int64_t kStagingBytes = 256_MiB;
constexpr int64_t kHeadChunkTokens = 1024;
// On a GPU: products at full speed, and temporaries of some GiB at most.
constexpr int64_t kGpuHeadChunkTokens = 8192;
constexpr int64_t kGpuMixtureChunkTokens = 32768;

MemoryAccount AccountOf(const v1::JobSpec& spec, const ModelDescription& model,
                        const v1::Plan& plan, int numa_node_count) {
  const BatchShape batch = BatchShapeOf(spec, plan);
  const SharedLayout layout = SharedLayout::Build(model, plan, batch);
  const StepGraph graph = BuildTrainingGraph(
      {.model = &model, .plan = &plan, .layout = &layout, .batch = batch});
  return AccountMemory(model, plan, layout, graph, batch, numa_node_count);
}

// What the job may still take of the host's memory on the node of the backlog.
int64_t HostRoomBytes(const v1::JobSpec& spec, const NodeLimits& limits,
                      const MemoryAccount& account) {
  const auto& budget = spec.budgets().host_memory_bytes();
  int64_t room = limits.pool_capacity_bytes.empty()
                     ? 0
                     : limits.pool_capacity_bytes[0] - account.host_bytes_by_node[0];
  if (budget.size() == 1 && budget[0] > 0) room = std::min(room, budget[0] - account.host_bytes);
  if (budget.size() > 1 && budget[0] > 0) {
    room = std::min(room, budget[0] - account.host_bytes_by_node[0]);
  }
  return std::max<int64_t>(0, room);
}

// Streamed units alternate over the NUMA nodes by what they hold already, so that every node's threads and
// DRAM get an equal part of the updates.
void BalanceNodes(const std::vector<ParameterUnit>& units, int numa_node_count, v1::Plan* plan) {
  std::vector<int64_t> held(static_cast<size_t>(numa_node_count), 0);
  for (const ParameterUnit& unit : units) {
    const auto least = std::min_element(held.begin(), held.end());
    plan->mutable_units(static_cast<int>(unit.index))
        ->set_numa_node(static_cast<int>(least - held.begin()));
    *least += unit.elements;
  }
}

// Of several GPUs. Accumulators add up on the host.
bool UsesDeviceCollectives(const v1::JobSpec& spec) {
  return spec.devices().kind() == v1::DEVICE_KIND_CUDA && spec.devices().count() > 1 &&
         spec.accumulation() == 1;
}

using Fits = std::function<bool(const v1::Plan&)>;

// Applies `change` with the largest count in [0, most] for which the plan still fits, given that it takes more the larger
// the count is; returns that count. Few plans are looked at, for each costs a graph.
int MakeTheMost(int most, const Fits& fits, v1::Plan* plan, const std::function<void(int, v1::Plan*)>& change) {
  int fitting = 0;
  for (int beyond = most + 1, count = most; beyond - fitting > 1; count = fitting + (beyond - fitting) / 2) {
    v1::Plan candidate = *plan;
    change(count, &candidate);
    (fits(candidate) ? fitting : beyond) = count;
  }
  change(fitting, plan);
  return fitting;
}

// In their order; what is too large makes room for what is smaller.
void MakeUnitsResident(std::vector<ParameterUnit> units, const Fits& fits, v1::Plan* plan) {
  while (!units.empty()) {
    const int made = MakeTheMost(static_cast<int>(units.size()), fits, plan, [&](int count, v1::Plan* candidate) {
      for (int i = 0; i < count; ++i) {
        candidate->mutable_units(static_cast<int>(units[static_cast<size_t>(i)].index))
            ->set_home(v1::STATE_HOME_RESIDENT);
      }
    });
    if (made == static_cast<int>(units.size())) return;
    const ParameterUnit refused = units[static_cast<size_t>(made)];
    units.erase(units.begin(), units.begin() + made + 1);
    std::erase_if(units, [&](const ParameterUnit& unit) {
      return unit.kind == refused.kind && unit.elements >= refused.elements;
    });
  }
}

}  // namespace

int64_t DeviceBudgetBytes(const v1::JobSpec& spec, const NodeLimits& limits) {
  const bool cuda = spec.devices().kind() == v1::DEVICE_KIND_CUDA;
  const int64_t wanted = spec.budgets().gpu_memory_bytes();
  if (!cuda || limits.gpu_memory_bytes == 0) return wanted;
  return wanted == 0 ? limits.gpu_memory_bytes : std::min(wanted, limits.gpu_memory_bytes);
}

v1::Plan MakeDefaultPlan(const v1::JobSpec& spec, const ModelDescription& model,
                         const NodeLimits& limits) {
  const int ranks = spec.devices().count();
  const int nodes = std::max(1, static_cast<int>(limits.pool_capacity_bytes.size()));
  const std::vector<ParameterUnit> units = BuildUnits(model, ranks);
  v1::Plan plan;
  plan.set_version(1);
  plan.set_path(v1::EXECUTION_PATH_LOCAL);
  plan.set_rank_count(ranks);
  plan.set_precision(spec.precision());
  plan.set_cuda_devices(spec.devices().kind() == v1::DEVICE_KIND_CUDA);
  int64_t largest_unit_elements = 0;
  for (const ParameterUnit& unit : units) {
    v1::UnitPlan* unit_plan = plan.add_units();
    unit_plan->set_unit(unit.name);
    unit_plan->set_home(v1::STATE_HOME_STREAMED);
    unit_plan->set_delivery(v1::PARAMETER_DELIVERY_FULL);
    largest_unit_elements = std::max(largest_unit_elements, unit.elements);
  }
  BalanceNodes(units, nodes, &plan);
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) {
    v1::LayerPlan* layer_plan = plan.add_layers();
    layer_plan->set_boundary(v1::BOUNDARY_HOME_HOST);
    layer_plan->set_attention_result(v1::ATTENTION_RESULT_HOME_REPLAYED);
  }
  plan.mutable_partitions()->set_attention_head_group_count(1);
  plan.mutable_partitions()->set_head_chunk_tokens(
      plan.cuda_devices() ? kGpuHeadChunkTokens : kHeadChunkTokens);
  if (plan.cuda_devices()) {
    plan.mutable_partitions()->set_mixture_chunk_tokens(kGpuMixtureChunkTokens);
  }
  // A small model is cut too, so that delivery, gradients and updates overlap within a unit.
  const int64_t weight_bytes = spec.precision() == v1::PRECISION_FLOAT32 ? 4 : 2;
  plan.set_chunk_bytes(std::clamp(largest_unit_elements * weight_bytes / 4, kSmallestChunkBytes,
                                  kLargestChunkBytes));
  plan.set_backlog_bytes(kBacklogBytes);
  plan.set_window_count(2);
  plan.set_gradient_buffer_count(2);
  plan.set_boundary_buffer_count(2);
  const bool deferred = spec.optimizer().max_gradient_norm() > 0.0 || spec.accumulation() > 1;
  plan.set_update_mode(deferred ? v1::UPDATE_MODE_DEFERRED : v1::UPDATE_MODE_OVERLAPPED);
  plan.set_reduction(v1::GRADIENT_REDUCTION_HOST);
  if (UsesDeviceCollectives(spec)) {
    // The host's memory, the scarce one, sees each weight and each gradient once instead of once a GPU.
    plan.set_reduction(v1::GRADIENT_REDUCTION_DEVICE_FLOAT32);
    for (v1::UnitPlan& unit : *plan.mutable_units()) unit.set_delivery(v1::PARAMETER_DELIVERY_SHARD);
  }
  plan.set_accumulation(spec.accumulation());
  plan.set_micro_batch_tokens(spec.global_batch() / ranks / spec.accumulation() *
                              spec.sequence_length());
  // On GPUs the cores are the optimizer's, but for one a worker and one for the job host.
  const int optimizer_threads =
      plan.cuda_devices() ? limits.cpu_count - ranks - 1 : limits.cpu_count / 2;
  for (int node = 0; node < nodes; ++node) {
    plan.add_optimizer_threads(std::max(1, optimizer_threads / nodes));
  }
  plan.set_worker_threads(plan.cuda_devices() ? 1 : std::max(1, limits.cpu_count / ranks));
  for (int rank = 0; rank < ranks; ++rank) plan.add_rank_numa_node(rank % nodes);
  // The fastest attention of GPUs does not repeat its last bits.
  plan.set_deterministic(!plan.cuda_devices());
  const int64_t state_bytes = 12 * ParameterCount(units);
  plan.set_snapshot_staging_bytes(std::clamp(state_bytes / 8, 4_MiB, kStagingBytes));

  const int64_t budget = DeviceBudgetBytes(spec, limits);
  const auto device_bytes = [&](const v1::Plan& candidate) {
    return AccountOf(spec, model, candidate, nodes).device_bytes;
  };
  if (budget > 0) FitWorkspace(model, spec.sequence_length(), device_bytes, budget, &plan);
  if (plan.cuda_devices() && !deferred) {
    const int64_t room = HostRoomBytes(spec, limits, AccountOf(spec, model, plan, nodes)) / ranks;
    const int64_t useful = std::clamp(state_bytes / 10, kBacklogBytes, kLargestBacklogBytes);
    plan.set_backlog_bytes(std::min(useful, kBacklogBytes + room));
  }
  const bool several_gpus = plan.cuda_devices() && ranks > 1;
  if (budget == 0 || (several_gpus && !UsesDeviceCollectives(spec))) return plan;
  const auto fits = [&](const v1::Plan& candidate) { return device_bytes(candidate) <= budget; };
  // From the bottom, where the turn of the step is exposed.
  std::vector<ParameterUnit> wanted = units;
  if (several_gpus) {
    std::erase_if(wanted, [](const ParameterUnit& unit) { return unit.kind == UnitKind::kEmbedding; });
  }
  MakeUnitsResident(std::move(wanted), fits, &plan);
  MakeTheMost(static_cast<int>(model.layer_count()), fits, &plan, [&](int count, v1::Plan* candidate) {
    for (int layer = 0; layer < count; ++layer) {
      candidate->mutable_layers(candidate->layers_size() - 1 - layer)->set_boundary(v1::BOUNDARY_HOME_DEVICE);
    }
  });
  KeepActivations(model, BatchShapeOf(spec, plan), spec.precision() == v1::PRECISION_FLOAT32,
                  budget - device_bytes(plan), &plan);
  return plan;
}

}  // namespace oom
