#include "runtime/model/description.h"

namespace oom {

const RotaryRule* ModelDescription::rotary() const {
  for (const LayerDescription& layer : layers) {
    if (layer.mixer == MixerKind::kAttention) return &layer.attention.rotary;
  }
  return nullptr;
}

std::optional<YarnScaling> ModelDescription::yarn() const {
  const RotaryRule* const rule = rotary();
  return rule == nullptr ? std::nullopt : rule->yarn;
}

void ModelDescription::set_yarn(const std::optional<YarnScaling>& yarn) {
  for (LayerDescription& layer : layers) {
    if (layer.mixer == MixerKind::kAttention) layer.attention.rotary.yarn = yarn;
  }
}

}  // namespace oom
