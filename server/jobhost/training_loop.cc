#include "server/jobhost/training_loop.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "planner/job_settings.h"

namespace oom {
namespace {

// Steps that workers may begin beyond the completed ones: one runs, the next one's loads are under
// way.
constexpr int64_t kStepsAhead = 2;
static_assert(kStepsAhead < kStepRing, "records are read after the next grant");

}  // namespace

Result<int64_t> TrainingLoop::Run() {
  completed_ = granted_ = options_.first_step;
  end_ = std::max(options_.context->spec().steps(), options_.first_step);
  cut_ = snapshot_at_ = options_.first_step;
  Grant();
  while (completed_ < end_) {
    if (options_.stop->must_abort()) {
      return Status(Code::kCancelled, "the job was stopped at once");
    }
    if (granted_ == completed_) {
      // The next cut has to wait until the last snapshot is written.
      options_.checkpointer->Wait();
      if (options_.page->aborted().Load() != 0)
        return Status(Code::kAborted, "the attempt was aborted");
      Grant();
      continue;
    }
    OOM_ASSIGN_OR_RETURN(const HostOptimizer::StepOutcome outcome,
                         options_.optimizer->FinishStep(completed_));
    ++completed_;
    Grant();
    OOM_RETURN_IF_ERROR(ReportStep(outcome));
    BeginSnapshotIfDue();
  }
  if (!ending_) return Status(Code::kCancelled, "the job was stopped at once");
  return completed_;
}

void TrainingLoop::Grant() {
  if (options_.stop->must_abort()) return;
  if (!stop_seen_ && options_.stop->request()) {
    stop_seen_ = true;
    // The cut of a checkpoint has to be announced before its last step is granted: one step more is
    // taken.
    const bool ends_here = granted_ == options_.first_step || granted_ == cut_;
    end_ = std::min(end_, ends_here ? granted_ : granted_ + 1);
  }
  while (!ending_) {
    if (granted_ == end_) {
      ending_ = true;
      options_.page->stop_step().Publish(static_cast<uint64_t>(end_) + 1);
      options_.on_ending();
      return;
    }
    if (granted_ >= completed_ + kStepsAhead) return;
    if (CutIsDue(granted_ + 1) && !TakeCut(granted_ + 1)) return;
    ++granted_;
    options_.page->step_limit().Publish(static_cast<uint64_t>(granted_));
  }
}

bool TrainingLoop::CutIsDue(int64_t steps) const {
  const int64_t every = options_.context->spec().checkpoint().every_steps();
  return steps == end_ || (every > 0 && steps % every == 0) || options_.stop->has_checkpoints();
}

// Announces the cut after `steps` steps, before the last of them is granted: owners copy a resident
// chunk right after its update. False: not yet, there is room for one snapshot at a time.
bool TrainingLoop::TakeCut(int64_t steps) {
  if (snapshot_at_ != cut_ || options_.checkpointer->active()) return false;
  cut_ = steps;
  options_.page->checkpoint_step().Publish(static_cast<uint64_t>(steps));
  options_.on_cut(steps, options_.stop->TakeCheckpoints());
  return true;
}

void TrainingLoop::BeginSnapshotIfDue() {
  if (snapshot_at_ == cut_ || cut_ != completed_) return;
  snapshot_at_ = cut_;
  // A resume must find a line for each step that the checkpoint holds.
  const Status synced = options_.reporter->Sync();
  if (!synced.ok()) spdlog::warn("the step log is not durable: {}", synced.ToString());
  options_.checkpointer->Begin(cut_);
}

Status TrainingLoop::WaitForRecords(int64_t step) const {
  for (int rank = 0; rank < options_.context->layout().rank_count(); ++rank) {
    const WaitResult done = options_.page->step_done(rank).WaitAtLeast(
        static_cast<uint64_t>(step) + 1, options_.page->aborted());
    if (done != WaitResult::kReached) return Status(Code::kAborted, "the attempt was aborted");
  }
  return Status::Ok();
}

Status TrainingLoop::ReportStep(const HostOptimizer::StepOutcome& outcome) {
  const int64_t step = completed_ - 1;
  OOM_RETURN_IF_ERROR(WaitForRecords(step));
  StepReport report = {
      .completed_steps = completed_,
      .loss = outcome.valid_targets > 0
                  ? outcome.loss_sum / static_cast<double>(outcome.valid_targets)
                  : 0.0,
      .auxiliary_loss = outcome.auxiliary_loss,
      .tokens = options_.context->tokens_per_step(),
      .gradient_norm = outcome.gradient_norm,
      .learning_rate = outcome.learning_rate,
  };
  StepCosts costs;
  double evaluation_loss_sum = 0.0;
  int64_t evaluation_targets = 0;
  for (int rank = 0; rank < options_.context->layout().rank_count(); ++rank) {
    const RankRecord record = options_.page->rank_record(rank, step);
    report.step_seconds = std::max(report.step_seconds, record.step_seconds);
    report.exposed_wait_seconds =
        std::max(report.exposed_wait_seconds, record.exposed_wait_seconds);
    report.device_bytes_peak = std::max(report.device_bytes_peak, record.device_bytes_peak);
    costs.host_to_device_bytes += record.host_to_device_bytes;
    costs.device_to_host_bytes += record.device_to_host_bytes;
    costs.boundary_bytes += record.boundary_bytes;
    costs.collective_bytes += record.collective_bytes;
    evaluation_loss_sum += record.evaluation_loss_sum;
    evaluation_targets += record.evaluation_targets;
  }
  report.host_bytes_peak = options_.host_bytes_peak();
  if (EvaluationFollows(options_.context->spec(), completed_) && evaluation_targets > 0) {
    report.evaluation_loss = evaluation_loss_sum / static_cast<double>(evaluation_targets);
  }
  OOM_RETURN_IF_ERROR(options_.reporter->Report(report));
  options_.on_step(report, costs);
  return Status::Ok();
}

}  // namespace oom
