// What a job's specification and plan mean to the processes that run it: the same conversion for oomd's
// planner, the job host and the workers. Pure functions but for OpenInitialState, which opens files.

#pragma once

#include <memory>
#include <vector>

#include "oom/v1/job.pb.h"
#include "oom/v1/plan.pb.h"
#include "runtime/base/status.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/description.h"
#include "runtime/model/state_source.h"
#include "runtime/optim/adamw.h"
#include "runtime/optim/schedule.h"

namespace oom {

// The config.json that describes the job's model.
const std::string& ConfigPath(const v1::JobSpec& spec);

// What that file describes, with the job's own settings in place of the file's. Fails with codes of
// ReadHfConfig, and with kInvalidArgument (field model.rope_scaling) for a model that the settings
// are not for. REQUIRES: `spec` was normalised.
Result<ModelDescription> ReadJobModel(const v1::JobSpec& spec);

BatchShape BatchShapeOf(const v1::JobSpec& spec, const v1::Plan& plan);

AdamWHyperparameters HyperparametersOf(const v1::JobSpec& spec);

Schedule ScheduleOf(const v1::JobSpec& spec);

Precision PrecisionOf(const v1::Plan& plan);

// Whether an evaluation follows the update that completes this many steps: every `every_steps`, and at the end.
bool EvaluationFollows(const v1::JobSpec& spec, int64_t completed_steps);

// The state that a job without a checkpoint starts from: the model's files, or random initialisation.
// Fails with kNotFound or kInvalidArgument (file and tensor named), reason INVALID_INPUT.
Result<std::unique_ptr<StateSource>> OpenInitialState(const v1::JobSpec& spec,
                                                      const ModelDescription& model,
                                                      const std::vector<ParameterUnit>& units);

}  // namespace oom
