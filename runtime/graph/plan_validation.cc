// ValidatePlan: what of a plan can be refused by looking at it and the model.

#include <string>
#include <vector>

#include "runtime/graph/graph_builder.h"
#include "runtime/model/unit.h"

namespace oom {
namespace {

Status PlanError(const std::string& field, const std::string& message) {
  return Status(Code::kInvalidArgument, message).WithField("plan." + field);
}

}  // namespace

Status ValidatePlan(const ModelDescription& model, const v1::Plan& plan) {
  if (plan.version() != 1) {
    return PlanError("version", "plan version " + std::to_string(plan.version()) + ", expected 1");
  }
  if (plan.path() != v1::EXECUTION_PATH_LOCAL) {
    return PlanError("path", "only the Local path runs here");
  }
  if (plan.rank_count() < 1 || plan.rank_count() > 64) {
    return PlanError("rank_count", "rank_count must be 1 to 64");
  }
  if (plan.reduction() == v1::GRADIENT_REDUCTION_UNSPECIFIED) {
    return PlanError("reduction", "reduction is missing");
  }
  const bool reduces_on_devices = plan.reduction() != v1::GRADIENT_REDUCTION_HOST;
  if (plan.reduction() == v1::GRADIENT_REDUCTION_DEVICE_BFLOAT16 &&
      plan.precision() == v1::PRECISION_FLOAT32) {
    return PlanError("reduction", "with float32 precision gradients are not rounded to bfloat16");
  }
  if (reduces_on_devices && plan.accumulation() > 1) {
    return PlanError("reduction", "accumulation over 1 adds up on the host: reduction must be HOST");
  }
  const auto positive = [](int64_t value, const char* field) {
    return value >= 1 ? Status::Ok() : PlanError(field, std::string(field) + " must be at least 1");
  };
  OOM_RETURN_IF_ERROR(positive(plan.chunk_bytes(), "chunk_bytes"));
  OOM_RETURN_IF_ERROR(positive(plan.window_count(), "window_count"));
  OOM_RETURN_IF_ERROR(positive(plan.gradient_buffer_count(), "gradient_buffer_count"));
  OOM_RETURN_IF_ERROR(positive(plan.boundary_buffer_count(), "boundary_buffer_count"));
  OOM_RETURN_IF_ERROR(positive(plan.accumulation(), "accumulation"));
  OOM_RETURN_IF_ERROR(positive(plan.micro_batch_tokens(), "micro_batch_tokens"));
  OOM_RETURN_IF_ERROR(positive(plan.worker_threads(), "worker_threads"));
  const v1::OperatorPartitions& partitions = plan.partitions();
  // Gated DeltaNet's chunks (runtime/ops/gated_delta_rule.h): other segments would change its bits.
  constexpr int64_t kRecurrentChunkTokens = 64;
  if (partitions.recurrent_segment_tokens() < 0 ||
      partitions.recurrent_segment_tokens() % kRecurrentChunkTokens != 0) {
    return PlanError("partitions.recurrent_segment_tokens",
                     "recurrent_segment_tokens must be a multiple of " +
                         std::to_string(kRecurrentChunkTokens) + ", or 0");
  }
  if (partitions.attention_sub_batch_tokens() < 0 || partitions.mixture_chunk_tokens() < 0 ||
      partitions.head_chunk_tokens() < 0) {
    return PlanError("partitions", "tokens of a part must be 0 or more");
  }
  if (plan.backlog_bytes() < 0)
    return PlanError("backlog_bytes", "backlog_bytes must be 0 or more");
  // A NUMA node of the plan is one that has optimizer threads.
  if (plan.optimizer_threads_size() == 0) {
    return PlanError("optimizer_threads", "optimizer_threads is missing");
  }
  for (const int threads : plan.optimizer_threads()) {
    if (threads < 1)
      return PlanError("optimizer_threads", "each NUMA node needs a thread at least");
  }
  for (const int node : plan.rank_numa_node()) {
    if (node < 0 || node >= plan.optimizer_threads_size()) {
      return PlanError("rank_numa_node",
                       "NUMA node " + std::to_string(node) + " has no optimizer threads");
    }
  }
  if (plan.update_mode() != v1::UPDATE_MODE_DEFERRED &&
      plan.update_mode() != v1::UPDATE_MODE_OVERLAPPED) {
    return PlanError("update_mode", "update_mode is missing");
  }
  if (plan.update_mode() == v1::UPDATE_MODE_OVERLAPPED && plan.accumulation() > 1) {
    return PlanError("update_mode", "accumulation over 1 needs deferred updates");
  }
  const std::vector<ParameterUnit> units = BuildUnits(model, plan.rank_count());
  if (static_cast<size_t>(plan.units_size()) != units.size()) {
    return PlanError("units", "the plan has " + std::to_string(plan.units_size()) +
                                  " units, the model " + std::to_string(units.size()));
  }
  for (const ParameterUnit& unit : units) {
    const v1::UnitPlan& unit_plan = plan.units(static_cast<int>(unit.index));
    const std::string field = "units[" + std::to_string(unit.index) + "]";
    if (unit_plan.unit() != unit.name) {
      return PlanError(field,
                       "unit '" + unit_plan.unit() + "' where the model has '" + unit.name + "'");
    }
    if (unit_plan.home() == v1::STATE_HOME_UNSPECIFIED) return PlanError(field, "home is missing");
    if (unit_plan.home() == v1::STATE_HOME_RESIDENT && plan.cuda_devices() &&
        plan.rank_count() > 1) {
      if (unit.kind == UnitKind::kEmbedding) {
        return PlanError(field, "the embedding is resident on one cuda device only");
      }
      if (plan.accumulation() > 1) {
        return PlanError(field, "with accumulation units are resident on one cuda device only");
      }
    }
    if (unit_plan.numa_node() < 0 || unit_plan.numa_node() >= plan.optimizer_threads_size()) {
      return PlanError(field, "NUMA node " + std::to_string(unit_plan.numa_node()) +
                                  " has no optimizer threads");
    }
  }
  if (plan.layers_size() != model.layer_count()) {
    return PlanError("layers", "the plan has " + std::to_string(plan.layers_size()) +
                                   " layers, the model " + std::to_string(model.layer_count()));
  }
  for (int layer = 0; layer < plan.layers_size(); ++layer) {
    const v1::LayerPlan& layer_plan = plan.layers(layer);
    const std::string field = "layers[" + std::to_string(layer) + "]";
    if (layer_plan.boundary() != v1::BOUNDARY_HOME_HOST &&
        layer_plan.boundary() != v1::BOUNDARY_HOME_DEVICE) {
      return PlanError(field, "a boundary is kept on HOST or DEVICE for this model");
    }
  }
  return Status::Ok();
}

}  // namespace oom
