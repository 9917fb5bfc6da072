// The plan that a job gets without one of its own: everything streamed, then, as far as the device budget
// reaches, the embedding and the lowest layers resident (what stays exposed of a step is the turn at the
// lowest layer; engine rules, section 6), then layer boundaries kept on the device. Pure functions.

#pragma once

#include <cstdint>

#include "oom/v1/job.pb.h"
#include "oom/v1/plan.pb.h"
#include "planner/plan_job.h"
#include "runtime/model/description.h"

namespace oom {

// Device memory that a job may take on each device: its budget, and no more than the GPUs have. 0: not limited.
int64_t DeviceBudgetBytes(const v1::JobSpec& spec, const NodeLimits& limits);

// REQUIRES: `spec` was normalised. The result fits the device budget if any plan of this form does; whether
// it does is the caller's check.
v1::Plan MakeDefaultPlan(const v1::JobSpec& spec, const ModelDescription& model,
                         const NodeLimits& limits);

}  // namespace oom
