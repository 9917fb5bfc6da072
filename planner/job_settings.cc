#include "planner/job_settings.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/model/hf_config.h"
#include "runtime/model/hf_source.h"

namespace oom {

const std::string& ConfigPath(const v1::JobSpec& spec) {
  return spec.model().path().empty() ? spec.model().config() : spec.model().path();
}

Result<ModelDescription> ReadJobModel(const v1::JobSpec& spec) {
  OOM_ASSIGN_OR_RETURN(ModelDescription model, ReadHfConfig(ConfigPath(spec)));
  if (!spec.model().has_rope_scaling()) return model;
  const auto refuse = [](const std::string& message) {
    return Status(Code::kInvalidArgument, "model.rope_scaling: " + message)
        .WithReason("INVALID_INPUT")
        .WithField("model.rope_scaling");
  };
  if (model.family != Family::kQwen3Moe && model.family != Family::kQwen35Moe) {
    return refuse("YaRN is for the Qwen families, the model is a " +
                  std::string(ArchitectureName(model.family)));
  }
  if (model.rotary() == nullptr) return refuse("the model has no attention layer");
  if (!(model.rotary()->theta > 1.0)) return refuse("YaRN needs a rope_theta above 1");
  const v1::RopeScaling& scaling = spec.model().rope_scaling();
  int64_t original_positions = scaling.original_max_position_embeddings();
  if (original_positions == 0) {
    original_positions = model.yarn() ? model.yarn()->original_positions : model.max_positions;
  }
  model.set_yarn(MakeYarn(scaling.factor(), std::min(original_positions, kMostYarnPositions)));
  return model;
}

BatchShape BatchShapeOf(const v1::JobSpec& spec, const v1::Plan& plan) {
  return {.micro_batch_sequences = plan.micro_batch_tokens() / spec.sequence_length(),
          .sequence_length = spec.sequence_length(),
          .accumulation = plan.accumulation()};
}

AdamWHyperparameters HyperparametersOf(const v1::JobSpec& spec) {
  const v1::OptimizerSpec& optimizer = spec.optimizer();
  return {.beta1 = optimizer.betas(0),
          .beta2 = optimizer.betas(1),
          .epsilon = optimizer.epsilon(),
          .weight_decay = optimizer.weight_decay()};
}

Schedule ScheduleOf(const v1::JobSpec& spec) {
  Schedule schedule;
  switch (spec.schedule().kind()) {
    case v1::SCHEDULE_KIND_LINEAR: schedule.kind = ScheduleKind::kLinear; break;
    case v1::SCHEDULE_KIND_COSINE: schedule.kind = ScheduleKind::kCosine; break;
    case v1::SCHEDULE_KIND_WARMUP_STABLE_DECAY:
      schedule.kind = ScheduleKind::kWarmupStableDecay;
      break;
    default: schedule.kind = ScheduleKind::kConstant; break;
  }
  schedule.peak_learning_rate = spec.optimizer().learning_rate();
  schedule.warmup_steps = spec.schedule().warmup_steps();
  schedule.total_steps = spec.steps();
  schedule.minimum_ratio = spec.schedule().minimum_ratio();
  schedule.decay_fraction = spec.schedule().decay_fraction();
  return schedule;
}

Precision PrecisionOf(const v1::Plan& plan) {
  return plan.precision() == v1::PRECISION_FLOAT32 ? Precision::kFloat32 : Precision::kBfloat16;
}

bool EvaluationFollows(const v1::JobSpec& spec, int64_t completed_steps) {
  if (spec.data().evaluation().empty()) return false;
  const int64_t every = spec.evaluation().every_steps();
  return completed_steps == spec.steps() || (every > 0 && completed_steps % every == 0);
}

Result<std::unique_ptr<StateSource>> OpenInitialState(const v1::JobSpec& spec,
                                                      const ModelDescription& model,
                                                      const std::vector<ParameterUnit>& units) {
  if (spec.model().initialize() == v1::INITIALIZATION_RANDOM) {
    return MakeRandomSource(model, units, spec.seed());
  }
  auto source = HfSource::Open(spec.model().path(), model, units);
  if (!source.ok()) {
    Status status = source.status();
    return std::move(status).WithReason("INVALID_INPUT");
  }
  return std::unique_ptr<StateSource>(std::move(source).value());
}

}  // namespace oom
