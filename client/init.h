// `oom init`: a commented job file for a model.

#pragma once

#include <string>

#include "runtime/base/status.h"

namespace oom {

// `model` is a Hugging Face directory, a config.json or the name of a geometry (client/geometry.h).
// A directory with weights is trained on, a configuration alone starts from random weights. Fails
// with kNotFound, and with kInvalidArgument for a configuration that is not JSON or a family that
// OOM does not train.
Result<std::string> JobFileForModel(const std::string& model);

}  // namespace oom
