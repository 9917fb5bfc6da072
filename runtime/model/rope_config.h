// The rotary embedding's keys of a config.json: `rope_theta` beside `rope_scaling`, or
// `rope_parameters` that hold both. Internal to runtime/model. Pure functions.

#pragma once

#include <nlohmann/json.hpp>

#include "runtime/model/config_reader.h"
#include "runtime/model/description.h"

namespace oom {

struct RopeReading {
  double default_theta = 1e4;
  bool may_be_yarn = false;      // Refused by name otherwise, as every other kind of scaling is.
  double default_partial = 1.0;  // Of a head, what turns.
  int64_t head_size = 0;
  int64_t max_positions = 0;
};

RotaryRule ReadRope(ConfigReader& reader, const RopeReading& reading);

// Makes the keys say what `model` has, in the form in which they are there.
void WriteRope(const ModelDescription& model, nlohmann::ordered_json* config);

}  // namespace oom
