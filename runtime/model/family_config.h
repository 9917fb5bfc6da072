// What each family's config.json says, read into a ModelDescription. Every key of the published configurations is
// used, ignored because it says nothing about training, or refused by name. Internal to runtime/model.

#pragma once

#include "runtime/model/config_reader.h"
#include "runtime/model/description.h"

namespace oom {

// Bounds that keep every size of a hostile configuration far from overflow.
inline constexpr int64_t kLayerLimit = 4096;

// `reader` is at the text model's keys (of a multimodal configuration its `text_config`). REQUIRES: model->family is
// set.
void ReadMixtral(ConfigReader& reader, ModelDescription* model);
void ReadQwen3(ConfigReader& reader, ModelDescription* model);
void ReadQwen35(ConfigReader& reader, ModelDescription* model);
void ReadGemma4(ConfigReader& reader, ModelDescription* model);

}  // namespace oom
