// The part of Controller that users call, and the commit. Job hosts and timers:
// controller_hosts.cc.
#include "server/oomd/controller.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/check.h"
#include "server/oomd/job_state.h"

namespace oom {
namespace {

void SetTime(google::protobuf::Timestamp* timestamp, double unix_seconds) {
  timestamp->set_seconds(static_cast<int64_t>(std::floor(unix_seconds)));
  timestamp->set_nanos(static_cast<int32_t>((unix_seconds - std::floor(unix_seconds)) * 1e9));
}

Status WrongState(const JobRecord& record, const std::string& verb) {
  return Status(
             Code::kFailedPrecondition,
             record.job.name() + " is " + StateName(record.job.state()) + " and cannot be " + verb)
      .WithReason("JOB_" + StateName(record.job.state()))
      .WithField(record.job.name());
}

}  // namespace

Controller::Controller(const Options& options, const Parts& parts)
    : options_(options), parts_(parts), random_(options.seed), resources_(options.node) {
  // Not numbers of an earlier daemon, whose answers may still be on their way.
  next_checkpoint_request_ = static_cast<int64_t>(parts_.clock->UnixSeconds() * 1e3);
}

const JobRecord* Controller::Find(const std::string& uid) const {
  if (const auto it = staged_.find(uid); it != staged_.end()) return &it->second;
  const auto it = jobs_.find(uid);
  return it == jobs_.end() ? nullptr : &it->second;
}

Result<std::string> Controller::UidOf(const std::string& name) const {
  if (const auto it = staged_uids_.find(name); it != staged_uids_.end()) return it->second;
  const auto it = uids_.find(name);
  if (it != uids_.end()) return it->second;
  return Status(Code::kNotFound, "there is no job \"" + name + "\"")
      .WithReason("JOB_NOT_FOUND")
      .WithField(name);
}

JobRecord& Controller::Edit(const std::string& uid) {
  const auto it = staged_.find(uid);
  if (it != staged_.end()) return it->second;
  return staged_.emplace(uid, jobs_.at(uid)).first->second;
}

void Controller::Record(JobRecord& record, const Change& change) {
  v1::Job& job = record.job;
  const double now = parts_.clock->UnixSeconds();
  OOM_CHECK_MSG(job.state() == v1::JOB_STATE_UNSPECIFIED || MayFollow(job.state(), change.state),
                (StateName(job.state()) + " -> " + StateName(change.state)).c_str());
  job.set_state(change.state);
  job.set_reason(change.reason);
  job.set_message(change.message);
  job.set_sequence(next_sequence_++);
  job.set_etag(std::to_string(job.sequence()));
  job.set_jobs_ahead(0);
  job.clear_blocked_by();
  if (change.state == v1::JOB_STATE_RUNNING && !job.has_start_time())
    SetTime(job.mutable_start_time(), now);
  if (IsTerminal(change.state)) {
    SetTime(job.mutable_end_time(), now);
    job.set_eta_seconds(0);
  }
  if (IsTerminal(change.state) || change.state == v1::JOB_STATE_SUSPENDED) {
    record.stop_state = v1::JOB_STATE_UNSPECIFIED;
  }
  batch_.events.push_back(
      {.sequence = job.sequence(), .unix_seconds = now, .job_name = job.name(), .job = Brief(job)});
}

void Controller::ReplyAfterCommit(const std::string& uid, Reply reply) {
  // The answer is the job as this call left it, not as a later one in the same commit does.
  AfterCommit([answer = Find(uid)->job, reply = std::move(reply)](const Status& status) {
    if (!status.ok()) {
      reply(status);
    } else {
      reply(answer);
    }
  });
}

Status Controller::CheckWritable() const {
  if (store_failed_) {
    return Status(Code::kUnavailable, "the job store failed and is read-only; see the daemon's log")
        .WithReason("STORE_FAILED");
  }
  if (shutting_down_)
    return Status(Code::kUnavailable, "the daemon is stopping").WithReason("SHUTTING_DOWN");
  return Status::Ok();
}

Result<std::optional<v1::Job>> Controller::FindReplay(uint32_t owner, const std::string& request_id,
                                                      uint64_t payload_hash) {
  if (request_id.empty()) return std::optional<v1::Job>();
  std::optional<StoredRequest> known;
  for (const StoredRequest& staged : batch_.requests) {
    if (staged.owner == owner && staged.request_id == request_id) known = staged;
  }
  if (!known) {
    OOM_ASSIGN_OR_RETURN(known, parts_.store->FindRequest(owner, request_id));
  }
  if (!known) return std::optional<v1::Job>();
  if (known->payload_hash != payload_hash) {
    return Status(Code::kInvalidArgument, "request_id \"" + request_id +
                                              "\" was used with another payload, for " +
                                              known->answer.name())
        .WithReason("REQUEST_ID_REUSED")
        .WithField("request_id");
  }
  return std::optional<v1::Job>(known->answer);
}

void Controller::CreateJob(NewJob wanted, Reply reply) {
  // Another call with this id may have come while the job was planned.
  Result<std::optional<v1::Job>> replay =
      FindReplay(wanted.owner, wanted.request_id, wanted.payload_hash);
  if (!replay.ok()) return reply(replay.status());
  if (replay->has_value()) {
    return AfterCommit([answer = **replay, reply](const Status& status) {
      if (!status.ok()) return reply(status);
      reply(answer);
    });
  }
  const Status valid = [&]() -> Status {
    OOM_RETURN_IF_ERROR(CheckWritable());
    if (!wanted.job_id.empty() && !IsValidJobId(wanted.job_id)) {
      return Status(Code::kInvalidArgument,
                    "job_id must be lower-case letters, digits and '-', begin with a "
                    "letter, end with a letter or digit, and have at most 63")
          .WithReason("INVALID_JOB_ID")
          .WithField("job_id");
    }
    if (!wanted.job_id.empty() && UidOf("jobs/" + wanted.job_id).ok()) {
      return Status(Code::kAlreadyExists,
                    "jobs/" + wanted.job_id + " exists; choose another job_id")
          .WithReason("JOB_EXISTS")
          .WithField("jobs/" + wanted.job_id);
    }
    if (const std::string never = resources_.NeverFits(NeedOf(wanted.job, wanted.pools));
        !never.empty()) {
      const bool memory = never.rfind("host memory", 0) == 0;
      const std::string field = memory ? "budgets.host_memory" : "devices.count";
      return Status(Code::kResourceExhausted,
                    field + ": this node can never run the job: " + never)
          .WithReason(memory ? "OUT_OF_HOST_MEMORY" : "NOT_ENOUGH_DEVICES")
          .WithField(field);
    }
    int queued = 0;
    for (const auto& [uid, record] : staged_) queued += jobs_.contains(uid) ? 0 : 1;
    if (static_cast<int>(queue_.size()) + queued >= options_.max_queued_jobs) {
      return Status(Code::kResourceExhausted, "the queue is full (" +
                                                  std::to_string(options_.max_queued_jobs) +
                                                  " jobs); try again later")
          .WithReason("QUEUE_FULL")
          .WithField("queue");
    }
    return Status::Ok();
  }();
  if (!valid.ok()) return reply(valid);

  JobRecord record;
  record.job = std::move(wanted.job);
  record.pools = std::move(wanted.pools);
  std::string id = wanted.job_id;
  if (id.empty()) {
    const std::string base = MakeJobId(record.job.spec().name());
    id = base;
    for (int suffix = 2; UidOf("jobs/" + id).ok(); ++suffix)
      id = base + "-" + std::to_string(suffix);
  }
  const double now = parts_.clock->UnixSeconds();
  record.job.set_name("jobs/" + id);
  record.job.set_uid_owner(wanted.owner);
  SetTime(record.job.mutable_create_time(), now);
  if (wanted.validate_only) {
    record.job.set_state(v1::JOB_STATE_UNSPECIFIED);
    return reply(record.job);
  }
  const uint64_t high = random_();
  record.job.set_uid(MakeUuid7(now, high, random_()));
  const std::string uid = record.job.uid();
  record.submit_order = next_submit_order_++;
  Record(record, {.state = v1::JOB_STATE_QUEUED, .reason = "", .message = ""});
  staged_uids_[record.job.name()] = uid;
  if (!wanted.request_id.empty()) {
    batch_.requests.push_back({.owner = wanted.owner,
                               .request_id = wanted.request_id,
                               .payload_hash = wanted.payload_hash,
                               .unix_seconds = now,
                               .answer = record.job});
  }
  staged_.emplace(uid, std::move(record));
  ReplyAfterCommit(uid, std::move(reply));
}

void Controller::CancelJob(const v1::CancelJobRequest& request, Reply reply) {
  const Status writable = CheckWritable();
  if (!writable.ok()) return reply(writable);
  const Result<std::string> uid = UidOf(request.name());
  if (!uid.ok()) return reply(uid.status());
  const JobRecord& current = *Find(*uid);
  if (!request.etag().empty() && request.etag() != current.job.etag()) {
    return reply(Status(Code::kAborted, request.name() + " has changed since etag " +
                                            request.etag() + "; it is " +
                                            StateName(current.job.state()) + " now")
                     .WithReason("ETAG_MISMATCH")
                     .WithField("etag"));
  }
  if (IsTerminal(current.job.state())) return reply(WrongState(current, "cancelled"));
  JobRecord& record = Edit(*uid);
  if (!IsActive(record.job.state())) {
    Record(record, {.state = v1::JOB_STATE_CANCELLED, .reason = "USER_CANCEL", .message = ""});
  } else if (!hosts_.contains(*uid) && record.job.state() == v1::JOB_STATE_RECOVERING) {
    // Between two hosts there is nothing to stop.
    DropTimers(*uid);
    Record(record, {.state = v1::JOB_STATE_CANCELLED, .reason = "USER_CANCEL", .message = ""});
  } else {
    const bool second = record.stop_state == v1::JOB_STATE_CANCELLED;
    const bool now = second || request.mode() == v1::CANCEL_MODE_NOW;
    const double grace = request.grace_seconds() > 0 ? request.grace_seconds() : 60.0;
    RequestStop(record, v1::JOB_STATE_CANCELLED, !now, now ? 0 : grace, "USER_CANCEL");
  }
  ReplyAfterCommit(*uid, std::move(reply));
}

void Controller::SuspendJob(const std::string& name, Reply reply) {
  const Status writable = CheckWritable();
  if (!writable.ok()) return reply(writable);
  const Result<std::string> uid = UidOf(name);
  if (!uid.ok()) return reply(uid.status());
  const JobRecord& current = *Find(*uid);
  const v1::JobState state = current.job.state();
  if (IsTerminal(state) || state == v1::JOB_STATE_SUSPENDED || state == v1::JOB_STATE_STOPPING) {
    return reply(WrongState(current, "suspended"));
  }
  JobRecord& record = Edit(*uid);
  if (state == v1::JOB_STATE_QUEUED ||
      (state == v1::JOB_STATE_RECOVERING && !hosts_.contains(*uid))) {
    DropTimers(*uid);
    Record(record, {.state = v1::JOB_STATE_SUSPENDED, .reason = "HELD", .message = ""});
  } else {
    RequestStop(record, v1::JOB_STATE_SUSPENDED, /*checkpoint=*/true, /*grace_seconds=*/600,
                "HELD");
  }
  ReplyAfterCommit(*uid, std::move(reply));
}

void Controller::ResumeJob(const std::string& name, Reply reply) {
  const Status writable = CheckWritable();
  if (!writable.ok()) return reply(writable);
  const Result<std::string> uid = UidOf(name);
  if (!uid.ok()) return reply(uid.status());
  if (Find(*uid)->job.state() != v1::JOB_STATE_SUSPENDED)
    return reply(WrongState(*Find(*uid), "resumed"));
  Record(Edit(*uid), {.state = v1::JOB_STATE_QUEUED, .reason = "", .message = ""});
  ReplyAfterCommit(*uid, std::move(reply));
}

void Controller::CheckpointJob(const std::string& name, CheckpointReply reply) {
  const Status writable = CheckWritable();
  if (!writable.ok()) return reply(writable);
  const Result<std::string> uid = UidOf(name);
  if (!uid.ok()) return reply(uid.status());
  const JobRecord& record = *Find(*uid);
  if (record.job.state() != v1::JOB_STATE_RUNNING) return reply(WrongState(record, "checkpointed"));
  if (!connected_.contains(*uid)) {
    return reply(Status(Code::kUnavailable, "the job host of " + name + " is not connected")
                     .WithReason("JOB_HOST_AWAY"));
  }
  const int64_t number = next_checkpoint_request_++;
  checkpoints_[number] = {.uid = *uid, .reply = std::move(reply)};
  internal::v1::DaemonFrame frame;
  frame.mutable_checkpoint()->set_request(number);
  parts_.launcher->Send(*uid, frame);
}

void Controller::Flush() {
  // A start is a change too, and a launch that fails is another one.
  while (CommitOnce() || StartJobs()) {
  }
  ExplainQueue();
}

bool Controller::CommitOnce() {
  if (staged_.empty() && after_commit_.empty()) return false;
  Status status;
  for (const auto& [uid, record] : staged_) batch_.jobs.push_back(record);
  if (!batch_.empty()) {
    const double begin = parts_.clock->MonotonicSeconds();
    status = parts_.store->Commit(batch_);
    if (status.ok()) {
      parts_.observer->StoreCommitted(parts_.clock->MonotonicSeconds() - begin);
    } else {
      store_failed_ = true;
      parts_.observer->StoreFailed(status);
    }
  }
  std::vector<std::function<void(const Status&)>> actions;
  std::map<std::string, JobRecord> staged;
  StoreBatch batch;
  actions.swap(after_commit_);
  staged.swap(staged_);
  std::swap(batch, batch_);
  if (status.ok()) {
    uids_.merge(staged_uids_);
    for (auto& [uid, record] : staged) {
      Reconcile(record);
      parts_.view->Put(record.submit_order, record.job);
      jobs_[uid] = std::move(record);
    }
    for (const StoredEvent& event : batch.events) {
      v1::JobEvent out;
      out.set_kind(v1::JOB_EVENT_KIND_TRANSITION);
      out.set_sequence(event.sequence);
      out.set_resume_token(MakeResumeToken(store_id_, event.sequence));
      *out.mutable_job() = event.job;
      SetTime(out.mutable_time(), event.unix_seconds);
      committed_sequence_ = event.sequence;
      parts_.events->Publish(out);
      parts_.observer->JobTransitioned(event.job);
    }
  }
  staged_uids_.clear();
  for (const auto& action : actions) action(status);
  return true;
}

void Controller::Reconcile(const JobRecord& record) {
  const std::string& uid = record.job.uid();
  const v1::JobState state = record.job.state();
  queue_.Remove(uid);
  if (state == v1::JOB_STATE_QUEUED) {
    queue_.Add({.id = uid,
                .priority = record.job.spec().priority(),
                .submit_order = record.submit_order,
                .need = NeedOf(record.job, record.pools)});
  }
  if (IsActive(state)) {
    if (!resources_.holds(uid)) {
      resources_.Take(uid, NeedOf(record.job, record.pools), record.devices);
    }
  } else {
    resources_.Release(uid);
    parts_.launcher->ReleasePools(uid);
  }
}

void Controller::ExplainQueue() {
  for (const JobQueue::Waiting& waiting : queue_.Explain(resources_)) {
    JobRecord& record = jobs_.at(waiting.id);
    const std::string blocked_by = waiting.head.empty()
                                       ? waiting.blocked_by
                                       : jobs_.at(waiting.head).job.name() + " starts first";
    v1::Job& job = record.job;
    if (job.reason() == waiting.reason && job.blocked_by() == blocked_by &&
        job.jobs_ahead() == waiting.jobs_ahead) {
      continue;
    }
    job.set_reason(waiting.reason);
    job.set_blocked_by(blocked_by);
    job.set_jobs_ahead(waiting.jobs_ahead);
    PublishProgress(record);
  }
}

void Controller::PublishBookmark() {
  v1::JobEvent event;
  event.set_kind(v1::JOB_EVENT_KIND_BOOKMARK);
  event.set_sequence(committed_sequence_);
  event.set_resume_token(MakeResumeToken(store_id_, committed_sequence_));
  SetTime(event.mutable_time(), parts_.clock->UnixSeconds());
  parts_.events->Publish(event);
}

void Controller::PublishProgress(const JobRecord& record) {
  parts_.view->Put(record.submit_order, record.job);
  v1::JobEvent event;
  event.set_kind(v1::JOB_EVENT_KIND_PROGRESS);
  event.set_sequence(committed_sequence_);
  event.set_resume_token(MakeResumeToken(store_id_, committed_sequence_));
  *event.mutable_job() = Brief(record.job);
  SetTime(event.mutable_time(), parts_.clock->UnixSeconds());
  parts_.events->Publish(event);
}

}  // namespace oom
