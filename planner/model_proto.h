// Conversion of a model description to its message. Pure functions.

#pragma once

#include "oom/v1/model.pb.h"
#include "runtime/model/description.h"

namespace oom {

v1::ModelDescription ToProto(const ModelDescription& model, int64_t parameter_count);

}  // namespace oom
