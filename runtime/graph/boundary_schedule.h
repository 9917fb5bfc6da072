// BoundarySchedule says which layers' inputs come back from the host in backward, and when the
// device memory that they come into is taken. Usually that is the plan's own,
// `boundary_buffer_count` places that take turns. Where attention runs in groups of query heads
// (the plan had to save memory), it is taken from the operators' memory: as far ahead as the places
// would allow, but a layer below such an attention gets its input only once the groups' workspace
// is free (paper, section 5.4). Immutable; thread-safe.

#pragma once

#include <cstdint>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/model/description.h"

namespace oom {

class BoundarySchedule {
 public:
  BoundarySchedule(const ModelDescription& model, const v1::Plan& plan);

  // Whether the layer's input leaves for the host and comes back: only the replay of its mixer
  // reads it again.
  bool Returns(int64_t layer) const { return returns_[static_cast<size_t>(layer)]; }
  // From the operators' memory instead of the plan's.
  bool taken_on_demand() const { return on_demand_; }
  // Layers whose inputs' places are taken when backward of `layer` has ended, or forward (`layer`:
  // the number of layers). Empty unless they are taken on demand.
  const std::vector<int64_t>& TakenBehind(int64_t layer) const {
    return taken_behind_[static_cast<size_t>(layer)];
  }

 private:
  std::vector<bool> returns_;
  bool on_demand_ = false;
  std::vector<std::vector<int64_t>> taken_behind_;
};

}  // namespace oom
