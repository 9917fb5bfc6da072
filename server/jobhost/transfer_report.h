// The bytes that an attempt moved, by resource and unit: what the workers and the host optimizer counted, as
// <output>/trace/transfers.json, beside which the plan's estimate can be laid (engine rules, section 13).

#pragma once

#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/status.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/optim/host_optimizer.h"

namespace oom {

// `steps`: completed in this attempt. `ranks`: what each rank said at its end. Codes of WriteFileAtomically.
Status WriteTransferReport(const std::string& path, int64_t steps, const SharedLayout& layout,
                           const std::vector<internal::v1::WorkerDone>& ranks,
                           const HostOptimizer& optimizer);

}  // namespace oom
