// The rotary embedding's keys of a config.json: `rope_theta` beside `rope_scaling`, or
// `rope_parameters` that hold both. Internal to runtime/model. Pure functions.

#pragma once

#include <nlohmann/json.hpp>

#include "runtime/model/config_reader.h"
#include "runtime/model/description.h"

namespace oom {

// Sets rope_theta and yarn. Refuses every other kind of scaling by name, and YaRN outside the Qwen
// families. REQUIRES: family and max_positions are set.
void ReadRope(ConfigReader& reader, ModelDescription* model);

// Makes the keys say what `model` has, in the form in which they are there.
void WriteRope(const ModelDescription& model, nlohmann::ordered_json* config);

}  // namespace oom
