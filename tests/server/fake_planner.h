// A planner without model files: one pool on NUMA node 0 of label "bytes" (default 1 MiB), and
// errors on request (label "refuse").

#pragma once

#include <cstdlib>

#include "planner/plan_job.h"
#include "runtime/base/units.h"

namespace oom {

inline Result<PlannedJob> FakePlan(const v1::JobSpec& spec, const NodeLimits& limits) {
  if (spec.labels().contains("refuse")) {
    return Status(Code::kInvalidArgument, "optimizer.betas: must be two numbers")
        .WithReason("INVALID_INPUT")
        .WithField("optimizer.betas");
  }
  PlannedJob job;
  job.spec = spec;
  const auto steps = spec.labels().find("steps");
  if (steps != spec.labels().end()) job.spec.set_steps(std::atoll(steps->second.c_str()));
  if (job.spec.steps() == 0) job.spec.set_steps(10);
  if (job.spec.devices().count() == 0) job.spec.mutable_devices()->set_count(1);
  job.plan.set_version(1);
  job.plan.set_rank_count(job.spec.devices().count());
  internal::v1::Pool pool;
  pool.set_name("state");
  pool.set_numa_node(static_cast<int>(limits.pool_capacity_bytes.size()) - 1);
  pool.set_bytes(spec.labels().contains("bytes") ? std::atoll(spec.labels().at("bytes").c_str())
                                                 : 1_MiB);
  job.pools.push_back(pool);
  return job;
}

}  // namespace oom
