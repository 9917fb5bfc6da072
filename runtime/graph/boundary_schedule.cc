#include "runtime/graph/boundary_schedule.h"

#include <algorithm>

#include "runtime/graph/head_groups.h"

namespace oom {

BoundarySchedule::BoundarySchedule(const ModelDescription& model, const v1::Plan& plan) {
  const int64_t layers = model.layer_count();
  taken_behind_.resize(static_cast<size_t>(layers + 1));
  const auto in_groups = [&](int64_t layer) {
    return RunsInHeadGroups(plan.partitions(), model.layer(layer));
  };
  for (int64_t layer = 0; layer < layers; ++layer) {
    const v1::LayerPlan& layer_plan = plan.layers(static_cast<int>(layer));
    returns_.push_back(layer_plan.boundary() == v1::BOUNDARY_HOME_HOST &&
                       !layer_plan.retain_mixer());
    on_demand_ = on_demand_ || in_groups(layer);
  }
  if (!on_demand_) return;
  for (int64_t layer = layers - 1; layer >= 0; --layer) {
    if (!Returns(layer)) continue;
    const bool below_groups = layer + 1 < layers && in_groups(layer + 1);
    const int64_t ahead = below_groups ? 1 : plan.boundary_buffer_count();
    taken_behind_[static_cast<size_t>(std::min(layer + ahead, layers))].push_back(layer);
  }
}

}  // namespace oom
