// Builds the three graphs of a job over the same units: training, evaluation. (A checkpoint needs no graph of
// its own: the job host reads streamed state at the cut, owners copy resident chunks after their updates.)
// Pure functions; oomd's planner, the job host and every worker get the same graph from the same plan.

#pragma once

#include "oom/v1/plan.pb.h"
#include "runtime/base/status.h"
#include "runtime/graph/step_graph.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/description.h"

namespace oom {

// Everything the builders read. All must outlive the call.
struct GraphInputs {
  const ModelDescription* model = nullptr;
  const v1::Plan* plan = nullptr;
  const SharedLayout* layout = nullptr;
  BatchShape batch;
};

// Fails with kInvalidArgument, Status::field() in the plan, for a plan that cannot be run: a unit missing or
// misnamed, deferred updates missing where accumulation needs them, counts below 1, a path, delivery or
// boundary home that this model cannot take.
Status ValidatePlan(const ModelDescription& model, const v1::Plan& plan);

// REQUIRES: ValidatePlan is OK.
StepGraph BuildTrainingGraph(const GraphInputs& inputs);
StepGraph BuildEvaluationGraph(const GraphInputs& inputs);

}  // namespace oom
