// A plan for humans and scripts.

#pragma once

#include "client/output.h"
#include "oom/v1/job.pb.h"

namespace oom {

// Of a job that came back planned. Table forms: the model's size, memory by space, disk for
// checkpoints, the lower bound of the step time by resource, what clipping costs. json, jsonl: a
// plan file, which `plan:` of a job accepts. yaml: the same for reading.
void WritePlan(const v1::Job& job, Output* output);

}  // namespace oom
