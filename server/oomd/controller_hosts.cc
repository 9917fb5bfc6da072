// The part of Controller that starts jobs, hears from job hosts, and keeps the retry rules and
// timers.
#include <algorithm>
#include <cmath>

#include "runtime/base/check.h"
#include "runtime/base/units.h"
#include "server/oomd/controller.h"
#include "server/oomd/job_state.h"

namespace oom {
namespace {

// Of a suspension that the daemon itself asked for; such jobs are queued again when it is back.
constexpr const char* kDraining = "DRAINING";

}  // namespace

Status Controller::Recover() {
  OOM_ASSIGN_OR_RETURN(StoreContent content, parts_.store->Load());
  store_id_ = content.store_id;
  committed_sequence_ = content.last_sequence;
  next_sequence_ = content.last_sequence + 1;
  for (JobRecord& record : content.jobs) {
    next_submit_order_ = std::max(next_submit_order_, record.submit_order + 1);
    uids_[record.job.name()] = record.job.uid();
    Reconcile(record);
    parts_.view->Put(record.submit_order, record.job);
    jobs_[record.job.uid()] = std::move(record);
  }
  for (const auto& [uid, record] : jobs_) {
    const v1::JobState state = record.job.state();
    if (state == v1::JOB_STATE_SUSPENDED && record.job.reason() == kDraining) {
      Record(Edit(uid), {.state = v1::JOB_STATE_QUEUED, .reason = "", .message = ""});
    }
    if (!IsActive(state)) {
      // The host of a job that has ended may still wait for the acknowledgement of that.
      if (record.job.attempt() > 0 && parts_.launcher->Adopt(uid) == Launcher::Found::kAlive) {
        hosts_.insert(uid);
        AddTimer(options_.stop_slack_seconds, uid,
                 [this, uid = uid] { parts_.launcher->Kill(uid); });
      }
      continue;
    }
    switch (parts_.launcher->Adopt(uid)) {
      case Launcher::Found::kAlive:
        hosts_.insert(uid);
        // Whoever was asked to stop by the daemon before is asked again by SendStop when it says
        // hello.
        if (record.stop_state != v1::JOB_STATE_UNSPECIFIED) {
          AddTimer(record.stop_grace_seconds + options_.stop_slack_seconds, uid,
                   [this, uid = uid] { parts_.launcher->Kill(uid); });
        }
        break;
      case Launcher::Found::kNeverStarted:
        // The daemon died between the commit and the start: no failure of the job.
        if (record.stop_state == v1::JOB_STATE_UNSPECIFIED && state == v1::JOB_STATE_STARTING) {
          Edit(uid);
          AfterCommit([this, uid = uid](const Status& status) {
            if (status.ok()) Launch(uid);
          });
          break;
        }
        HostLost(uid);
        break;
      case Launcher::Found::kDead:
        HostLost(uid);
        break;
    }
  }
  Flush();
  return store_failed_ ? CheckWritable() : Status::Ok();
}

bool Controller::StartJobs() {
  if (shutting_down_ || store_failed_) return false;
  const std::string uid = queue_.NextToStart(resources_);
  // A job that was suspended and resumed waits until its last host has gone.
  if (uid.empty() || hosts_.contains(uid)) return false;
  StageStart(uid);
  return true;
}

void Controller::StageStart(const std::string& uid) {
  JobRecord& record = Edit(uid);
  if (!record.job.has_start_time()) {
    const double created = static_cast<double>(record.job.create_time().seconds()) +
                           static_cast<double>(record.job.create_time().nanos()) * 1e-9;
    parts_.observer->QueueWaited(std::max(0.0, parts_.clock->UnixSeconds() - created));
  }
  record.job.set_attempt(record.job.attempt() + 1);
  record.devices = resources_.ChooseDevices(NeedOf(record.job, record.pools));
  Record(record, {.state = v1::JOB_STATE_STARTING, .reason = "", .message = ""});
  AfterCommit([this, uid](const Status& status) {
    if (status.ok()) Launch(uid);
  });
}

void Controller::Launch(const std::string& uid) {
  const JobRecord& record = *Find(uid);
  internal::v1::JobStart start;
  start.set_uid(uid);
  start.set_job_id(record.id());
  *start.mutable_spec() = record.job.spec();
  *start.mutable_plan() = record.job.plan();
  for (const internal::v1::Pool& pool : record.pools) *start.add_pools() = pool;
  start.set_first_pool_fd(10);
  start.set_job_directory(options_.job_directory_root + "/" + uid);
  start.set_first_attempt(record.job.attempt());
  start.set_failure_count(record.job.failure_count());
  start.set_backoff_initial_seconds(options_.backoff_initial_seconds);
  start.set_backoff_max_seconds(options_.backoff_max_seconds);
  start.set_last_failure_durable_step(record.last_failure_durable_step);
  const bool cuda = record.job.spec().devices().kind() == v1::DEVICE_KIND_CUDA;
  start.set_worker_path(options_.worker_path + (cuda ? "-cuda" : ""));
  for (const int device : record.devices) start.add_devices(device);
  start.set_ephemeral(options_.ephemeral);
  start.set_next_transition(record.last_transition + 1);
  const Status started = parts_.launcher->Start(start);
  if (started.ok()) {
    hosts_.insert(uid);
    return;
  }
  parts_.observer->Warned("job " + record.job.name() + " does not start: " + started.ToString());
  const bool memory = started.code() == Code::kResourceExhausted;
  Record(Edit(uid), {.state = v1::JOB_STATE_FAILED,
                     .reason = memory ? "OUT_OF_HOST_MEMORY" : "INTERNAL",
                     .message = "the job host does not start: " + started.message()});
}

void Controller::RequestStop(JobRecord& record, v1::JobState final_state, bool checkpoint,
                             double grace_seconds, const std::string& reason) {
  record.stop_state = final_state;
  record.stop_with_checkpoint = checkpoint;
  record.stop_grace_seconds = grace_seconds;
  const std::string uid = record.job.uid();
  Record(record, {.state = v1::JOB_STATE_STOPPING, .reason = reason, .message = ""});
  AfterCommit([this, uid, grace_seconds](const Status& status) {
    if (!status.ok()) return;
    DropTimers(uid);
    SendStop(*Find(uid));
    AddTimer(grace_seconds + options_.stop_slack_seconds, uid,
             [this, uid] { parts_.launcher->Kill(uid); });
  });
}

void Controller::SendStop(const JobRecord& record) {
  internal::v1::DaemonFrame frame;
  internal::v1::Stop& stop = *frame.mutable_stop();
  stop.set_final_state(record.stop_state);
  stop.set_checkpoint(record.stop_with_checkpoint);
  stop.set_grace_seconds(record.stop_grace_seconds);
  stop.set_reason(record.job.reason());
  parts_.launcher->Send(record.job.uid(), frame);
}

void Controller::OnHello(const std::string& uid, const internal::v1::HostHello& hello) {
  const JobRecord* record = Find(uid);
  if (record == nullptr || hello.uid() != uid) {
    parts_.observer->Warned("a job host says that it runs " + hello.uid() + ", expected " + uid);
    return;
  }
  connected_.insert(uid);
  if (hello.has_progress()) ApplyProgress(uid, hello.progress());
  if (record->stop_state != v1::JOB_STATE_UNSPECIFIED) SendStop(*record);
}

void Controller::OnTransition(const std::string& uid, const internal::v1::Transition& transition) {
  const JobRecord* known = Find(uid);
  if (known == nullptr) return;
  const int64_t number = transition.number();
  const auto acknowledge = [this, uid, number](const Status& status) {
    if (!status.ok()) return;
    internal::v1::DaemonFrame frame;
    frame.mutable_ack()->set_number(number);
    parts_.launcher->Send(uid, frame);
  };
  // Recorded before, once: the host did not see the acknowledgement.
  if (number <= known->last_transition) return AfterCommit(acknowledge);
  if (store_failed_) return;  // The host keeps it in its journal and repeats it.

  JobRecord& record = Edit(uid);
  record.last_transition = number;
  v1::Job& job = record.job;
  Change change{
      .state = transition.state(), .reason = transition.reason(), .message = transition.message()};
  const bool ends = IsTerminal(change.state) || change.state == v1::JOB_STATE_SUSPENDED;
  if (record.stop_state != v1::JOB_STATE_UNSPECIFIED && !ends) {
    // What the host did before it heard of the stop.
    change.state = v1::JOB_STATE_STOPPING;
    change.reason = job.reason();
  }
  if (ends && change.reason.empty() && change.state == record.stop_state)
    change.reason = job.reason();
  if (!MayFollow(job.state(), change.state)) {
    parts_.observer->Warned("job host of " + job.name() + " reports " + StateName(change.state) +
                            " after " + StateName(job.state()) + "; ignored");
    return AfterCommit(acknowledge);
  }
  job.set_attempt(std::max(job.attempt(), transition.attempt()));
  job.set_step(transition.step());
  job.set_durable_step(std::max(job.durable_step(), transition.durable_step()));
  job.set_failure_count(std::max(job.failure_count(), transition.failure_count()));
  if (!transition.failed_log_path().empty()) job.set_failed_log_path(transition.failed_log_path());
  if (job.spec().steps() > 0) {
    job.set_progress(
        std::min(1.0, static_cast<double>(job.step()) / static_cast<double>(job.spec().steps())));
  }
  if (change.state == v1::JOB_STATE_RECOVERING)
    record.last_failure_durable_step = transition.durable_step();
  Record(record, change);
  AfterCommit(acknowledge);
  if (!ends) return;
  AfterCommit([this, uid, name = job.name()](const Status& status) {
    if (!status.ok()) return;
    DropTimers(uid);
    FailCheckpoints(
        uid, Status(Code::kAborted, name + " ended before the checkpoint").WithReason("JOB_ENDED"));
    // It exits once it has seen the acknowledgement; nobody waits for one that does not.
    if (hosts_.contains(uid)) {
      AddTimer(options_.stop_slack_seconds, uid, [this, uid] { parts_.launcher->Kill(uid); });
    }
  });
}

void Controller::OnProgress(const std::string& uid, const internal::v1::Progress& progress) {
  ApplyProgress(uid, progress);
}

void Controller::ApplyProgress(const std::string& uid, const internal::v1::Progress& progress) {
  const auto it = jobs_.find(uid);
  if (it == jobs_.end() || !IsActive(it->second.job.state())) return;
  const bool durable = progress.durable_step() > Find(uid)->job.durable_step();
  const auto apply = [&](v1::Job& job) {
    job.set_step(progress.step());
    job.set_loss(progress.loss());
    job.set_tokens_per_second(progress.tokens_per_second());
    job.set_step_seconds(progress.step_seconds());
    job.set_eta_seconds(progress.eta_seconds());
    if (job.spec().steps() > 0) {
      job.set_progress(
          std::min(1.0, static_cast<double>(job.step()) / static_cast<double>(job.spec().steps())));
    }
  };
  // The durable step is a promise, so it is on the disk before anybody sees it; the rest is only
  // news.
  if (durable && !store_failed_) Edit(uid).job.set_durable_step(progress.durable_step());
  apply(it->second.job);
  if (const auto staged = staged_.find(uid); staged != staged_.end()) apply(staged->second.job);
  PublishProgress(it->second);
  parts_.observer->Progressed(it->second.job, progress);
}

void Controller::OnCheckpointDone(const std::string& uid,
                                  const internal::v1::CheckpointDone& done) {
  const auto it = checkpoints_.find(done.request());
  if (it == checkpoints_.end() || it->second.uid != uid) return;
  const CheckpointReply reply = std::move(it->second.reply);
  checkpoints_.erase(it);
  if (done.code() != 0) {
    return reply(
        Status(static_cast<Code>(done.code()), done.message()).WithReason("CHECKPOINT_FAILED"));
  }
  if (done.step() > Find(uid)->job.durable_step() && !store_failed_) {
    Edit(uid).job.set_durable_step(done.step());
  }
  AfterCommit([done, reply](const Status& status) {
    if (!status.ok()) return reply(status);
    reply(done);
  });
}

void Controller::FailCheckpoints(const std::string& uid, const Status& status) {
  for (auto it = checkpoints_.begin(); it != checkpoints_.end();) {
    if (it->second.uid != uid) {
      ++it;
      continue;
    }
    const CheckpointReply reply = std::move(it->second.reply);
    it = checkpoints_.erase(it);
    reply(status);
  }
}

void Controller::OnDisconnect(const std::string& uid) {
  connected_.erase(uid);
  FailCheckpoints(uid, Status(Code::kUnavailable, "the connection to the job host broke")
                           .WithReason("JOB_HOST_AWAY"));
}

void Controller::OnExit(const std::string& uid) {
  hosts_.erase(uid);
  connected_.erase(uid);
  DropTimers(uid);
  FailCheckpoints(uid, Status(Code::kAborted, "the job host ended").WithReason("JOB_HOST_LOST"));
  const JobRecord* record = Find(uid);
  if (record == nullptr || !IsActive(record->job.state()) || store_failed_) return;
  HostLost(uid);
}

void Controller::HostLost(const std::string& uid) {
  // What it had written down before it died happened, and may be its end.
  for (const internal::v1::Transition& transition : parts_.launcher->Leftovers(uid))
    OnTransition(uid, transition);
  if (!IsActive(Find(uid)->job.state())) return;
  JobRecord& record = Edit(uid);
  v1::Job& job = record.job;
  if (record.stop_state != v1::JOB_STATE_UNSPECIFIED) {
    // It was to stop, and so it has; what it had written is what is durable.
    const std::string reason = job.reason();
    Record(record, {.state = record.stop_state,
                    .reason = reason,
                    .message = "the job host ended before it reported that it had stopped"});
    return;
  }
  const int max_failures =
      job.spec().retry().has_max_failures() ? job.spec().retry().max_failures() : 3;
  const std::string where = "the job host died at step " + std::to_string(job.step()) +
                            " (durable step " + std::to_string(job.durable_step()) + ")";
  // A host that is found dead while its job waits to recover is not a second failure of it.
  const bool counted = job.state() == v1::JOB_STATE_RECOVERING && job.reason() == "JOB_HOST_LOST";
  if (!counted) {
    const bool same_step = record.last_failure_durable_step == job.durable_step();
    job.set_failure_count(job.failure_count() + 1);
    record.last_failure_durable_step = job.durable_step();
    if (same_step || job.failure_count() > max_failures) {
      Record(record,
             {.state = v1::JOB_STATE_FAILED,
              .reason = "RETRIES_EXHAUSTED",
              .message = where + (same_step ? ", the second failure in a row at this durable step"
                                            : ", failure " + std::to_string(job.failure_count()) +
                                                  " of at most " + std::to_string(max_failures))});
      return;
    }
  }
  // Full jitter: between nothing and the doubled backoff.
  const double limit =
      std::min(options_.backoff_max_seconds,
               options_.backoff_initial_seconds * std::exp2(std::max(0, job.failure_count() - 1)));
  const double wait = std::uniform_real_distribution<double>(0, std::max(limit, 1e-9))(random_);
  Record(record, {.state = v1::JOB_STATE_RECOVERING,
                  .reason = "JOB_HOST_LOST",
                  .message = where + "; a new attempt starts in " + FormatSeconds(wait)});
  AfterCommit([this, uid, wait](const Status& status) {
    if (!status.ok()) return;
    AddTimer(wait, uid, [this, uid] {
      if (!shutting_down_ && !store_failed_) StageStart(uid);
    });
  });
}

void Controller::BeginShutdown() {
  if (shutting_down_) return;
  if (options_.ephemeral && !store_failed_) {
    for (const std::string& uid : std::set<std::string>(hosts_)) {
      const JobRecord& record = *Find(uid);
      if (!IsActive(record.job.state()) || record.stop_state != v1::JOB_STATE_UNSPECIFIED) continue;
      RequestStop(Edit(uid), v1::JOB_STATE_SUSPENDED, /*checkpoint=*/true, /*grace_seconds=*/60,
                  kDraining);
    }
  }
  shutting_down_ = true;
  Flush();
}

void Controller::EndWaits(const Status& status) {
  std::map<int64_t, PendingCheckpoint> waiting;
  waiting.swap(checkpoints_);
  for (const auto& [number, pending] : waiting) pending.reply(status);
}

void Controller::AddTimer(double seconds_from_now, const std::string& uid,
                          std::function<void()> action) {
  timers_.emplace(parts_.clock->MonotonicSeconds() + seconds_from_now,
                  Timer{.uid = uid, .action = std::move(action)});
}

void Controller::DropTimers(const std::string& uid) {
  std::erase_if(timers_, [&](const auto& entry) { return entry.second.uid == uid; });
}

std::optional<double> Controller::NextDeadline() const {
  if (timers_.empty()) return std::nullopt;
  return timers_.begin()->first;
}

void Controller::OnTimer() {
  const double now = parts_.clock->MonotonicSeconds();
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const std::function<void()> action = std::move(timers_.begin()->second.action);
    timers_.erase(timers_.begin());
    action();
  }
  Flush();
}

}  // namespace oom
