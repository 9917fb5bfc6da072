// What plans may take of the node's GPUs beside other users of the machine.

#pragma once

#include <string>
#include <vector>

#include "planner/plan_job.h"
#include "server/oomd/gpu_inventory.h"
#include "server/oomd/service_context.h"

namespace oom {

// Sets limits->gpu_memory_bytes to the least of what the GPUs have: what is free of one that no job
// holds and that others use (limits->gpu_memory_note says so), else all of it. `holders`: by GPU,
// "" when no job holds it.
void LimitGpuMemory(const std::vector<Gpu>& gpus, const std::vector<std::string>& holders,
                    NodeLimits* limits);

// The limits for planning a job now. Asks the driver if the job wants GPUs, and waits for the
// control loop; not from its thread.
NodeLimits LimitsNow(const ServiceContext& services, const v1::JobSpec& spec);

}  // namespace oom
