// The model of a checkpoint's manifest (manifest.md) as JSON. Pure functions.

#pragma once

#include <string>

#include "runtime/base/status.h"
#include "runtime/model/description.h"
#include "runtime/model/strict_json.h"

namespace oom {

nlohmann::json ModelJson(const ModelDescription& model);

// Fails with kDataLoss.
Status ParseModelJson(const nlohmann::json& json, const std::string& where, ModelDescription* model);

}  // namespace oom
