#include "server/jobhost/job_machine.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <utility>

#include "runtime/base/clock.h"
#include "runtime/checkpoint/export.h"

namespace oom {
namespace {

// oomd queues a job that was suspended for this reason again by itself.
constexpr const char* kDraining = "DRAINING";
constexpr double kStopGraceSeconds = 60.0;

bool IsFinal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED || state == v1::JOB_STATE_SUSPENDED;
}

std::string ReasonOf(const Status& status) {
  if (!status.reason().empty()) return status.reason();
  if (status.code() == Code::kInvalidArgument) return "INVALID_INPUT";
  if (status.code() == Code::kResourceExhausted) return "STORAGE_FULL";
  return "INTERNAL";
}

std::string MessageOf(const Status& status) {
  return status.field().empty() ? status.message() : status.field() + ": " + status.message();
}

RetryPolicy::Options RetryOptions(const internal::v1::JobStart& start) {
  const v1::RetrySpec& retry = start.spec().retry();
  return {.max_failures = retry.has_max_failures() ? retry.max_failures() : 3,
          .backoff_initial_seconds = start.backoff_initial_seconds(),
          .backoff_max_seconds = start.backoff_max_seconds(),
          .failure_count = start.failure_count(),
          .last_failure_durable_step = start.last_failure_durable_step()};
}

}  // namespace

JobMachine::JobMachine(Options options)
    : options_(std::move(options)),
      retry_(RetryOptions(options_.start)),
      random_(std::random_device{}()) {}

JobMachine::~JobMachine() = default;

Status JobMachine::Run() {
  OOM_RETURN_IF_ERROR(StartServer());
  bool is_over = false;
  for (const internal::v1::Transition& transition : journal_->pending()) {
    is_over = is_over || IsFinal(transition.state());
  }
  if (!is_over) {
    const End end = RunJob();
    // Everything is given back before anybody hears that it is over.
    context_.reset();
    options_.pool_fds.clear();
    output_.reset();
    Publish(end.state, attempt_, end);
  }
  while (!server_->WaitAcknowledged(std::chrono::milliseconds(200))) {
    // Nobody will come for what an ephemeral daemon's job has to say; it is in the journal.
    if (options_.start.ephemeral() && daemon_is_gone_.load()) break;
    if (journal_failed_.load()) break;
  }
  server_.reset();
  return Status::Ok();
}

Status JobMachine::StartServer() {
  const internal::v1::JobStart& start = options_.start;
  OOM_ASSIGN_OR_RETURN(journal_,
                       TransitionJournal::Open(start.job_directory() + "/transitions.journal",
                                               start.next_transition()));
  // What oomd had recorded when it wrote job.pb.
  OOM_RETURN_IF_ERROR(journal_->Acknowledge(start.next_transition() - 1));
  ControlServer::Options server;
  server.socket_path = start.job_directory() + "/host.sock";
  server.hello.set_uid(start.uid());
  server.hello.set_attempt(start.first_attempt());
  server.hello.set_pid(::getpid());
  server.journal = journal_.get();
  server.on_stop = [this](const internal::v1::Stop& stop) {
    spdlog::info("oomd asks to stop: {} {}", v1::JobState_Name(stop.final_state()),
                 stop.checkpoint() ? "with a checkpoint" : "now");
    stop_.Stop(stop);
  };
  server.on_checkpoint = [this](const internal::v1::CheckpointRequest& request) {
    stop_.AddCheckpoint(request.request());
  };
  server.on_trouble = [this](const Status& status) {
    spdlog::error("the transition journal fails: {}", status.ToString());
    journal_failed_.store(true);
  };
  if (start.ephemeral()) server.absence_limit = options_.daemon_absence_limit;
  server.on_absence = [this] {
    daemon_is_gone_.store(true);
    StopBecause("the daemon is gone");
  };
  server.on_terminate = [this] { StopBecause("the job host was asked to end"); };
  OOM_ASSIGN_OR_RETURN(server_, ControlServer::Start(std::move(server)));
  status_ = std::make_unique<JobStatus>(
      [this](const internal::v1::Progress& progress) { server_->SetProgress(progress); });
  return Status::Ok();
}

void JobMachine::StopBecause(const std::string& why) {
  spdlog::warn("{}: the job takes a checkpoint and stops", why);
  internal::v1::Stop stop;
  stop.set_final_state(v1::JOB_STATE_SUSPENDED);
  stop.set_checkpoint(true);
  stop.set_grace_seconds(kStopGraceSeconds);
  stop.set_reason(kDraining);
  stop_.Stop(stop);
}

void JobMachine::Publish(v1::JobState state, int attempt, const End& details) {
  const internal::v1::Progress progress = status_->progress();
  internal::v1::Transition transition;
  transition.set_state(state);
  transition.set_reason(details.reason);
  transition.set_message(details.message);
  transition.set_attempt(attempt);
  transition.set_step(progress.step());
  transition.set_durable_step(progress.durable_step());
  transition.set_failure_count(retry_.failure_count());
  transition.set_failed_log_path(details.failed_log_path);
  transition.set_unix_seconds(UnixSeconds());
  spdlog::info("{} {} {}", v1::JobState_Name(state), details.reason, details.message);
  const auto recorded = journal_->Append(std::move(transition));
  if (!recorded.ok()) {
    // oomd sees the end of this process instead.
    spdlog::critical("a transition cannot be recorded: {}", recorded.status().ToString());
    journal_failed_.store(true);
    return;
  }
  server_->TransitionsChanged();
}

JobMachine::End JobMachine::RunJob() {
  for (int number = options_.start.first_attempt();; ++number) {
    attempt_ = number;
    server_->SetAttempt(number);
    Publish(v1::JOB_STATE_STARTING, number, {});
    const Attempt::Outcome outcome = RunAttempt(number);
    if (const std::optional<End> end = AfterAttempt(outcome, number)) return *end;
  }
}

Status JobMachine::Prepare() {
  if (!output_) {
    OOM_ASSIGN_OR_RETURN(output_, OutputDirectory::Claim(options_.start));
  }
  const auto log_path = output_->LogPath(attempt_, "jobhost.log");
  if (log_path.ok()) options_.log->WriteTo(*log_path);
  if (context_) return Status::Ok();
  OOM_ASSIGN_OR_RETURN(context_, JobContext::Create(options_.start, std::move(options_.pool_fds),
                                                    std::move(options_.topology)));
  return Status::Ok();
}

Attempt::Outcome JobMachine::RunAttempt(int number) {
  if (Status prepared = Prepare(); !prepared.ok()) return {.status = std::move(prepared)};
  auto start = output_->FindStart(*context_, number == 1);
  if (!start.ok()) return {.status = start.status()};
  spdlog::info("attempt {} begins after {} steps, from {}", number, start->completed_steps,
               start->checkpoint_path.empty() ? "the model" : start->checkpoint_path);
  status_->Update([&](internal::v1::Progress& progress) {
    progress.set_step(start->completed_steps);
    progress.set_durable_step(start->in_own_output ? start->completed_steps : 0);
  });
  bool stopping = false;
  Attempt attempt({
      .context = context_.get(),
      .output = output_.get(),
      .stop = &stop_,
      .status = status_.get(),
      .number = number,
      .start = *start,
      .pools_are_new = std::exchange(pools_are_new_, false),
      .worker_silence_limit = options_.worker_silence_limit,
      .on_running = [this, number] { Publish(v1::JOB_STATE_RUNNING, number, {}); },
      .on_ending =
          [this, number, &stopping] {
            stopping = true;
            const auto request = stop_.request();
            Publish(v1::JOB_STATE_STOPPING, number,
                    request ? End{.reason = request->reason,
                                  .message = "the granted steps are finished"}
                            : End{.message = "the last steps, checkpoint and export"});
          },
      .on_checkpoint =
          [this](const internal::v1::CheckpointDone& done) { server_->CheckpointDone(done); },
  });
  return attempt.Run();
}

JobMachine::End JobMachine::StoppedEnd() const {
  const StopControl::Request request = *stop_.request();
  const internal::v1::Progress progress = status_->progress();
  return {.state = request.final_state,
          .reason = request.reason,
          .message = progress.durable_step() == progress.step()
                         ? "stopped after step " + std::to_string(progress.step())
                         : "stopped after step " + std::to_string(progress.step()) +
                               "; the newest checkpoint is of step " +
                               std::to_string(progress.durable_step())};
}

std::optional<JobMachine::End> JobMachine::AfterAttempt(const Attempt::Outcome& outcome,
                                                        int number) {
  const bool all_steps = outcome.completed_steps >= options_.start.spec().steps();
  if (outcome.status.ok() && all_steps) return Export();
  // A job that was to stop does not begin anew, whatever its last attempt died of.
  if (stop_.request()) {
    if (!outcome.status.ok() && outcome.status.code() != Code::kCancelled) {
      spdlog::warn("while stopping: {}", outcome.status.ToString());
    }
    return StoppedEnd();
  }
  return Recover(outcome, number);
}

std::optional<JobMachine::End> JobMachine::Recover(const Attempt::Outcome& outcome, int number) {
  const std::string reason = ReasonOf(outcome.status);
  const std::string message = MessageOf(outcome.status);
  const double uniform = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
  const RetryPolicy::Decision decision =
      retry_.OnFailure(reason, status_->progress().durable_step(), uniform);
  if (!decision.retry) {
    std::string text = message;
    if (decision.reason != reason) text = reason + ": " + text;
    if (!decision.explanation.empty()) text += "; " + decision.explanation;
    return End{
        .reason = decision.reason, .message = text, .failed_log_path = outcome.failed_log_path};
  }
  char delay[32];
  std::snprintf(delay, sizeof(delay), "%.1f", decision.delay_seconds);
  Publish(v1::JOB_STATE_RECOVERING, number,
          {.reason = reason,
           .message = message + "; the next attempt begins in " + delay + " s",
           .failed_log_path = outcome.failed_log_path});
  if (stop_.WaitForStop(std::chrono::duration<double>(decision.delay_seconds))) return StoppedEnd();
  return std::nullopt;
}

JobMachine::End JobMachine::Export() {
  const auto report = ExportCheckpoint(
      {.output_directory = output_->path(), .step = options_.start.spec().steps()});
  if (!report.ok()) {
    return {.reason = ReasonOf(report.status()),
            .message = "the export failed: " + MessageOf(report.status())};
  }
  return {.state = v1::JOB_STATE_SUCCEEDED, .message = "exported to " + report->destination};
}

}  // namespace oom
