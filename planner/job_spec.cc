// NormalizeJobSpec: the defaults that job.proto documents, and what can be refused by looking at the
// specification alone.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>

#include "planner/geometry.h"
#include "planner/plan_job.h"
#include "runtime/model/yarn.h"

namespace oom {
namespace {

// Far beyond any step; keeps byte counts of whole steps within 64 bits.
constexpr int64_t kMostStepTokens = int64_t{1} << 36;
constexpr int kMostCheckpoints = 100000;
constexpr size_t kMostPathBytes = 4096;

Status Invalid(const std::string& field, const std::string& message) {
  return Status(Code::kInvalidArgument, field + ": " + message)
      .WithReason("INVALID_INPUT")
      .WithField(field);
}

Status RequireAbsolute(const std::string& field, const std::string& path) {
  if (path.empty()) return Invalid(field, "is required");
  if (path.size() > kMostPathBytes) {
    return Invalid(field, "a path has at most " + std::to_string(kMostPathBytes) + " bytes");
  }
  if (path.find('\0') != std::string::npos) return Invalid(field, "a path has no NUL byte");
  if (!std::filesystem::path(path).is_absolute()) {
    return Invalid(field, "'" + path + "' is not an absolute path");
  }
  return Status::Ok();
}

Status RequireFraction(const std::string& field, double value) {
  if (std::isfinite(value) && value >= 0.0 && value <= 1.0) return Status::Ok();
  return Invalid(field, "must be between 0 and 1");
}

Status CheckRopeScaling(const v1::RopeScaling& scaling) {
  if (scaling.kind() != v1::ROPE_SCALING_KIND_YARN) {
    return Invalid("model.rope_scaling.kind", "must be `yarn`");
  }
  if (!std::isfinite(scaling.factor()) || !(scaling.factor() >= 1.0)) {
    return Invalid("model.rope_scaling.factor", "must be 1 or more");
  }
  if (scaling.original_max_position_embeddings() < 0 ||
      scaling.original_max_position_embeddings() > kMostYarnPositions) {
    return Invalid("model.rope_scaling.original_max_position_embeddings", "must be 1 to 2^30");
  }
  return Status::Ok();
}

Status CheckModel(v1::JobSpec* spec) {
  const v1::ModelSource& model = spec->model();
  if (model.has_rope_scaling()) OOM_RETURN_IF_ERROR(CheckRopeScaling(model.rope_scaling()));
  if (model.path().empty() == model.config().empty()) {
    return Invalid("model", "give `path` (a Hugging Face directory), or `config` and `initialize`");
  }
  if (model.path().empty()) {
    if (model.initialize() != v1::INITIALIZATION_RANDOM) {
      return Invalid("model.initialize", "a model from a config starts with `initialize: random`");
    }
    return RequireAbsolute("model.config", model.config());
  }
  return RequireAbsolute("model.path", model.path());
}

Status CheckBatch(v1::JobSpec* spec) {
  if (spec->sequence_length() < 1 || spec->sequence_length() > (1 << 24)) {
    return Invalid("sequence_length", "must be 1 to 16777216");
  }
  if (spec->global_batch() < 1 || spec->global_batch() > (1 << 24)) {
    return Invalid("global_batch", "must be 1 to 16777216");
  }
  if (spec->global_batch() * spec->sequence_length() > kMostStepTokens) {
    return Invalid("global_batch", "global_batch x sequence_length must be at most 2^36 tokens");
  }
  if (spec->accumulation() == 0) spec->set_accumulation(1);
  if (spec->accumulation() < 1) return Invalid("accumulation", "must be at least 1");
  if (spec->steps() < 1) return Invalid("steps", "must be at least 1");
  v1::DeviceSpec* devices = spec->mutable_devices();
  if (devices->kind() == v1::DEVICE_KIND_UNSPECIFIED) devices->set_kind(v1::DEVICE_KIND_CPU);
  if (devices->count() == 0) devices->set_count(1);
  if (devices->count() < 1 || devices->count() > 64) {
    return Invalid("devices.count", "must be 1 to 64");
  }
  const int64_t parts = int64_t{devices->count()} * spec->accumulation();
  if (spec->global_batch() % parts != 0) {
    return Invalid("global_batch", std::to_string(spec->global_batch()) +
                                       " sequences do not divide by devices.count x accumulation = " +
                                       std::to_string(parts));
  }
  return Status::Ok();
}

Status CheckOptimizer(v1::JobSpec* spec) {
  v1::OptimizerSpec* optimizer = spec->mutable_optimizer();
  if (!optimizer->has_learning_rate()) optimizer->set_learning_rate(3e-4);
  if (!std::isfinite(optimizer->learning_rate()) || optimizer->learning_rate() < 0.0) {
    return Invalid("optimizer.learning_rate", "must be 0 or more");
  }
  if (optimizer->betas().empty()) {
    optimizer->add_betas(0.9);
    optimizer->add_betas(0.95);
  }
  if (optimizer->betas_size() != 2) return Invalid("optimizer.betas", "must be two numbers");
  for (const double beta : optimizer->betas()) {
    if (!(beta >= 0.0 && beta < 1.0)) return Invalid("optimizer.betas", "must be in [0, 1)");
  }
  if (!optimizer->has_epsilon()) optimizer->set_epsilon(1e-8);
  if (!(optimizer->epsilon() > 0.0) || !std::isfinite(optimizer->epsilon())) {
    return Invalid("optimizer.epsilon", "must be above 0");
  }
  if (!optimizer->has_weight_decay()) optimizer->set_weight_decay(0.1);
  if (!(optimizer->weight_decay() >= 0.0) || !std::isfinite(optimizer->weight_decay())) {
    return Invalid("optimizer.weight_decay", "must be 0 or more");
  }
  if (!(optimizer->max_gradient_norm() >= 0.0) || !std::isfinite(optimizer->max_gradient_norm())) {
    return Invalid("optimizer.max_gradient_norm", "must be 0 (no clipping) or more");
  }
  return Status::Ok();
}

Status CheckSchedule(v1::JobSpec* spec) {
  v1::ScheduleSpec* schedule = spec->mutable_schedule();
  if (schedule->kind() == v1::SCHEDULE_KIND_UNSPECIFIED) {
    schedule->set_kind(v1::SCHEDULE_KIND_CONSTANT);
  }
  if (schedule->warmup_steps() < 0 || schedule->warmup_steps() > spec->steps()) {
    return Invalid("schedule.warmup_steps", "must be 0 to steps");
  }
  OOM_RETURN_IF_ERROR(RequireFraction("schedule.minimum_ratio", schedule->minimum_ratio()));
  if (!schedule->has_decay_fraction()) schedule->set_decay_fraction(0.1);
  return RequireFraction("schedule.decay_fraction", schedule->decay_fraction());
}

Status CheckOutput(v1::JobSpec* spec) {
  if (!IsGeometry(*spec)) OOM_RETURN_IF_ERROR(RequireAbsolute("output", spec->output()));
  v1::CheckpointSpec* checkpoint = spec->mutable_checkpoint();
  if (checkpoint->every_steps() < 0) return Invalid("checkpoint.every_steps", "must be 0 or more");
  if (checkpoint->keep() == 0) checkpoint->set_keep(3);
  if (checkpoint->keep() < 2 || checkpoint->keep() > kMostCheckpoints) {
    return Invalid("checkpoint.keep", "must be 2 to " + std::to_string(kMostCheckpoints));
  }
  if (spec->resume().empty()) spec->set_resume("auto");
  if (spec->resume() != "auto" && spec->resume() != "never") {
    OOM_RETURN_IF_ERROR(RequireAbsolute("resume", spec->resume()));
  }
  if (spec->plan().empty()) spec->set_plan("auto");
  if (spec->plan() != "auto") OOM_RETURN_IF_ERROR(RequireAbsolute("plan", spec->plan()));
  v1::EvaluationSpec* evaluation = spec->mutable_evaluation();
  if (evaluation->every_steps() < 0) return Invalid("evaluation.every_steps", "must be 0 or more");
  if (evaluation->sequences() < 0) return Invalid("evaluation.sequences", "must be 0 or more");
  if (evaluation->sequences() == 0) evaluation->set_sequences(64);
  if (evaluation->every_steps() > 0 && spec->data().evaluation().empty()) {
    return Invalid("data.evaluation", "is required by evaluation.every_steps");
  }
  v1::TraceSpec* trace = spec->mutable_trace();
  if (trace->first_step() == 0) trace->set_first_step(std::min<int64_t>(3, spec->steps()));
  if (!trace->has_step_count()) trace->set_step_count(2);
  if (trace->first_step() < 1 || trace->step_count() < 0 || trace->step_count() > 1000) {
    return Invalid("trace", "first_step counts from 1, at most 1000 steps");
  }
  return Status::Ok();
}

}  // namespace

Status NormalizeJobSpec(v1::JobSpec* spec) {
  OOM_RETURN_IF_ERROR(CheckModel(spec));
  if (!IsGeometry(*spec)) {
    OOM_RETURN_IF_ERROR(RequireAbsolute("data.train", spec->data().train()));
  }
  if (!spec->data().evaluation().empty()) {
    OOM_RETURN_IF_ERROR(RequireAbsolute("data.evaluation", spec->data().evaluation()));
  }
  if (!spec->data().has_shuffle()) spec->mutable_data()->set_shuffle(true);
  OOM_RETURN_IF_ERROR(CheckBatch(spec));
  OOM_RETURN_IF_ERROR(CheckOptimizer(spec));
  OOM_RETURN_IF_ERROR(CheckSchedule(spec));
  OOM_RETURN_IF_ERROR(CheckOutput(spec));
  if (!(spec->router().auxiliary_loss() >= 0.0) || !std::isfinite(spec->router().auxiliary_loss())) {
    return Invalid("router.auxiliary_loss", "must be 0 or more");
  }
  if (spec->router().auxiliary_loss() > 0.0 && spec->accumulation() > 1) {
    return Invalid(
        "router.auxiliary_loss",
        "must be 0 with accumulation over 1: its gradient needs every expert's load in the "
        "whole step, and that of later micro-batches is not known when the first one goes "
        "backward");
  }
  if (spec->seed() == 0) spec->set_seed(1);
  if (spec->precision() == v1::PRECISION_UNSPECIFIED) spec->set_precision(v1::PRECISION_BFLOAT16);
  if (spec->budgets().gpu_memory_bytes() < 0) {
    return Invalid("budgets.gpu_memory", "must be 0 or more");
  }
  for (const int64_t bytes : spec->budgets().host_memory_bytes()) {
    if (bytes < 0) return Invalid("budgets.host_memory", "must be 0 or more");
  }
  if (spec->priority() < -1000 || spec->priority() > 1000) {
    return Invalid("priority", "must be -1000 to 1000");
  }
  if (!spec->retry().has_max_failures()) spec->mutable_retry()->set_max_failures(3);
  if (spec->retry().max_failures() < 0) return Invalid("retry.max_failures", "must be 0 or more");
  return Status::Ok();
}

}  // namespace oom
