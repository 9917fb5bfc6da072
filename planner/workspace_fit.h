// FitWorkspace makes what a step needs of device memory beside state smaller, where a plan does not fit: operators in
// more parts (paper, Table 1), then fewer buffers between the link and the compute. Each change that is made is the one
// that saves most; changes that cost overlap come last. Pure function of its arguments.

#pragma once

#include <cstdint>
#include <functional>

#include "oom/v1/plan.pb.h"
#include "runtime/model/description.h"

namespace oom {

// `device_bytes` is what a plan needs of the fullest device. The plan may still not fit afterwards.
void FitWorkspace(const ModelDescription& model, int64_t sequence_length,
                  const std::function<int64_t(const v1::Plan&)>& device_bytes, int64_t budget_bytes, v1::Plan* plan);

}  // namespace oom
