// From a submitted job to a plan: defaults filled in, everything that can be refused refused with the
// field's name, the model described, memory accounted by space, and the pools that oomd has to create.
// Reads the model's config.json and checks that the data and model files are there; no LibTorch.
// Pure but for reading those files; thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "oom/v1/job.pb.h"
#include "oom/v1/plan.pb.h"
#include "runtime/base/status.h"
#include "runtime/model/description.h"

namespace oom {

// What the planner may use of the node. `pool_capacity_bytes` is by NUMA node and is what the node could
// give a job that runs alone.
struct NodeLimits {
  std::vector<int64_t> pool_capacity_bytes;
  int cpu_count = 1;
  int64_t gpu_memory_bytes = 0;  // Of the smallest GPU; 0: not known.
  std::string gpu_memory_note;   // Empty, or who has the rest of it.
};

struct PlannedJob {
  v1::JobSpec spec;             // With every default filled in.
  v1::ModelDescription model;
  v1::Plan plan;                // With its estimate.
  std::vector<internal::v1::Pool> pools;  // In the order of runtime/memory/pool_layout.h.
};

// Fills in the defaults that job.proto documents, and checks each field by itself. Fails with
// kInvalidArgument; Status::field() is the field's path in the YAML form ("optimizer.betas").
// REQUIRES nothing of the file system.
Status NormalizeJobSpec(v1::JobSpec* spec);

// Fails with kInvalidArgument (reason INVALID_INPUT; field named), kNotFound (a file), kResourceExhausted
// (reason OUT_OF_HOST_MEMORY, OUT_OF_GPU_MEMORY or STORAGE_FULL, with the numbers).
Result<PlannedJob> PlanJob(const v1::JobSpec& spec, const NodeLimits& limits);

}  // namespace oom
