// A geometry: a model's configuration whose size and speed are asked for, without the data, the
// weights and the output that a job needs. NormalizeJobSpec wants neither data.train nor output of
// one, and PlanJob plans it for the budgets that it gives, whatever the node has: without a host
// budget nothing is too large, and with a GPU budget the node's own GPUs do not matter. Pure
// functions; thread-safe.

#pragma once

#include "oom/v1/job.pb.h"

namespace oom {

// Such a specification is planned, never run.
inline bool IsGeometry(const v1::JobSpec& spec) {
  return !spec.model().config().empty() && spec.data().train().empty() && spec.output().empty();
}

}  // namespace oom
