#include "server/jobhost/step_reporter.h"

#include <spdlog/spdlog.h>

#include <utility>
#include <vector>

#include "runtime/base/clock.h"
#include "runtime/trace/step_log.h"
#include "runtime/trace/tensorboard.h"

namespace oom {

StepReporter::StepReporter() = default;
StepReporter::~StepReporter() = default;

Result<std::unique_ptr<StepReporter>> StepReporter::Open(const std::string& output_directory,
                                                         int64_t completed_steps) {
  std::unique_ptr<StepReporter> reporter(new StepReporter);
  OOM_ASSIGN_OR_RETURN(reporter->log_,
                       StepLog::Open(output_directory + "/steps.jsonl", completed_steps));
  if (reporter->log_->missing_count() > 0) {
    spdlog::warn("steps.jsonl lacks {} of the {} steps before this attempt",
                 reporter->log_->missing_count(), completed_steps);
  }
  OOM_ASSIGN_OR_RETURN(reporter->tensorboard_,
                       TensorboardWriter::Create({.directory = output_directory + "/tensorboard",
                                                  .completed_steps = completed_steps,
                                                  .unix_seconds = UnixSeconds()}));
  return reporter;
}

Status StepReporter::Report(const StepReport& report) {
  OOM_RETURN_IF_ERROR(log_->Append({
      .step = report.completed_steps,
      .loss = report.loss,
      .auxiliary_loss = report.auxiliary_loss,
      .tokens = report.tokens,
      .gradient_norm = report.gradient_norm,
      .learning_rate = report.learning_rate,
      .step_seconds = report.step_seconds,
      .tokens_per_second = report.tokens_per_second(),
      .exposed_wait_seconds = report.exposed_wait_seconds,
      .gpu_bytes_peak = report.device_bytes_peak,
      .host_bytes_peak = report.host_bytes_peak,
      .evaluation_loss = report.evaluation_loss,
  }));
  std::vector<std::pair<std::string, double>> values = {
      {"train/loss", report.loss},
      {"train/auxiliary_loss", report.auxiliary_loss},
      {"train/gradient_norm", report.gradient_norm},
      {"train/learning_rate", report.learning_rate},
      {"performance/step_seconds", report.step_seconds},
      {"performance/tokens_per_second", report.tokens_per_second()},
      {"performance/exposed_wait_seconds", report.exposed_wait_seconds},
  };
  if (report.evaluation_loss) values.emplace_back("evaluation/loss", *report.evaluation_loss);
  const Status status = tensorboard_->AddScalars(report.completed_steps, UnixSeconds(), values);
  if (!status.ok() && !std::exchange(tensorboard_failed_, true)) {
    spdlog::warn("TensorBoard events are not written: {}", status.ToString());
  }
  return Status::Ok();
}

Status StepReporter::Sync() { return log_->Sync(); }

}  // namespace oom
