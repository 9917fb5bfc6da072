#include "planner/kept_activations.h"

#include <algorithm>
#include <vector>

#include "planner/memory_account.h"
#include "planner/resource_bounds.h"

namespace oom {
namespace {

// Of the operators' memory, what blocks of changing sizes between kept ones leave unused. Without it an H200 ran out of
// memory 20 MiB short of its account, at 11 GiB of operators.
constexpr int64_t kFragmentationShare = 16;

struct Part {
  int layer = 0;
  bool is_mixer = false;
  double replay_flops_per_byte = 0.0;
};

void Keep(const Part& part, bool kept, v1::Plan* plan) {
  v1::LayerPlan* layer = plan->mutable_layers(part.layer);
  part.is_mixer ? layer->set_retain_mixer(kept) : layer->set_retain_mixture(kept);
}

}  // namespace

void KeepActivations(const ModelDescription& model, const BatchShape& batch, bool float32,
                     int64_t room_bytes, v1::Plan* plan) {
  const auto operator_bytes = [&] { return OperatorBytes(model, *plan, batch, float32); };
  const int64_t before = operator_bytes();
  const auto fits = [&] {
    const int64_t bytes = operator_bytes();
    return bytes - before + bytes / kFragmentationShare <= room_bytes;
  };
  std::vector<Part> parts;
  // From the top: what is kept there is the first to be free again.
  for (int layer = static_cast<int>(model.layer_count()) - 1; layer >= 0; --layer) {
    const ReplayFlops flops = TokenReplayFlops(model, layer, batch.sequence_length);
    for (const bool is_mixer : {true, false}) {
      Part part = {.layer = layer, .is_mixer = is_mixer};
      Keep(part, true, plan);
      const auto bytes = static_cast<double>(std::max<int64_t>(1, operator_bytes() - before));
      Keep(part, false, plan);
      part.replay_flops_per_byte = (is_mixer ? flops.mixer : flops.mixture) / bytes;
      parts.push_back(part);
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return a.replay_flops_per_byte > b.replay_flops_per_byte;
  });
  for (const Part& part : parts) {
    Keep(part, true, plan);
    if (!fits()) Keep(part, false, plan);
  }
}

}  // namespace oom
