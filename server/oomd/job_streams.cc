#include "server/oomd/job_streams.h"

#include <grpcpp/alarm.h>

#include <deque>

#include "server/oomd/job_state.h"
#include "server/oomd/log_reader.h"
#include "server/oomd/request_check.h"
#include "server/oomd/status_details.h"

namespace oom {
namespace {

// A stream that is fed by Next(). Everything that touches it holds a shared_ptr; gRPC's own hold on
// it ends with OnDone.
template <class Message>
class Stream : public grpc::ServerWriteReactor<Message>,
               public std::enable_shared_from_this<Stream<Message>> {
 public:
  void Hold() { self_ = this->shared_from_this(); }
  // Writes what is there. Called when something may have come.
  void Pump() {
    const MutexLock lock(mutex_);
    if (writing_ || finished_ || !ready_) return;
    Status end;
    if (Next(&message_, &end)) {
      writing_ = true;
      this->StartWrite(&message_);
    } else if (!end.ok() || complete_) {
      FinishLocked(ToGrpc(end));
    }
  }
  void End(const Status& status) {
    const MutexLock lock(mutex_);
    FinishLocked(ToGrpc(status));
  }
  void OnWriteDone(bool ok) override {
    {
      const MutexLock lock(mutex_);
      writing_ = false;
      if (!ok)
        return FinishLocked(grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone"));
    }
    Pump();
  }
  void OnCancel() override { End(Status(Code::kCancelled, "the client has gone")); }
  void OnDone() override {
    Unhook();
    const std::shared_ptr<Stream> last = std::move(self_);
  }

 protected:
  // The next message, or false; then `*end` or complete_ may say that there will be none.
  virtual bool Next(Message* message, Status* end) OOM_REQUIRES(mutex_) = 0;
  // No more callbacks from elsewhere.
  virtual void Unhook() {}
  void FinishLocked(const grpc::Status& status) OOM_REQUIRES(mutex_) {
    if (finished_) return;
    finished_ = true;
    this->Finish(status);
  }

  Mutex mutex_;
  bool ready_ OOM_GUARDED_BY(mutex_) = false;
  bool complete_ OOM_GUARDED_BY(mutex_) = false;
  bool finished_ OOM_GUARDED_BY(mutex_) = false;

 private:
  std::shared_ptr<Stream> self_;
  bool writing_ OOM_GUARDED_BY(mutex_) = false;
  Message message_ OOM_GUARDED_BY(mutex_);
};

class WatchStream final : public Stream<v1::JobEvent> {
 public:
  WatchStream(ServiceContext& services, const v1::WatchJobsRequest& request)
      : services_(services), request_(request) {}

  // On the control thread, so that nothing is committed between the subscription and what came
  // before it.
  void Begin(Controller& controller) {
    {
      const MutexLock lock(mutex_);
      if (finished_) return;
      if (services_.stopping) return FinishLocked(ToGrpc(DaemonStopping()));
      live_from_ = controller.last_sequence();
      if (request_.resume_token().empty()) {
        if (!request_.name().empty() && services_.view->Get(request_.name()) == nullptr) {
          return FinishLocked(
              ToGrpc(Status(Code::kNotFound, "there is no job \"" + request_.name() + "\"")
                         .WithReason("JOB_NOT_FOUND")
                         .WithField(request_.name())));
        }
        AddSnapshot();
        stored_to_ = live_from_;
      } else {
        const Result<int64_t> token = ParseResumeToken(services_.store_id, request_.resume_token());
        if (!token.ok()) return FinishLocked(ToGrpc(token.status()));
        if (*token > live_from_) {
          return FinishLocked(
              ToGrpc(Status(Code::kOutOfRange, "resume_token is ahead of the newest event")
                         .WithReason("RESUME_TOKEN_AHEAD")
                         .WithField("resume_token")));
        }
        stored_to_ = *token;
      }
      subscription_ = services_.events->Subscribe(request_.name());
      ready_ = true;
    }
    const std::weak_ptr<Stream> weak = this->weak_from_this();
    subscription_->SetNotify([weak] {
      if (const std::shared_ptr<Stream> stream = weak.lock()) stream->Pump();
    });
  }

 private:
  void AddSnapshot() OOM_REQUIRES(mutex_) {
    for (const auto& [order, job] : services_.view->List(0, SIZE_MAX, {})) {
      if (!request_.name().empty() && job->name() != request_.name()) continue;
      snapshot_.push_back(job);
    }
    bookmark_due_ = true;
  }

  bool Next(v1::JobEvent* event, Status* end) override OOM_REQUIRES(mutex_) {
    if (!snapshot_.empty()) {
      // No token: a watch that breaks within its snapshot begins again.
      *event = v1::JobEvent();
      event->set_kind(v1::JOB_EVENT_KIND_SNAPSHOT);
      event->set_sequence(snapshot_.front()->sequence());
      *event->mutable_job() = Brief(*snapshot_.front());
      snapshot_.pop_front();
      return true;
    }
    if (bookmark_due_) {
      bookmark_due_ = false;
      *event = v1::JobEvent();
      event->set_kind(v1::JOB_EVENT_KIND_BOOKMARK);
      event->set_sequence(live_from_);
      event->set_resume_token(MakeResumeToken(services_.store_id, live_from_));
      return true;
    }
    while (stored_.empty() && stored_to_ < live_from_) {
      Result<std::vector<StoredEvent>> page = services_.store->ReadEvents(stored_to_, kStoredPage);
      if (!page.ok()) {
        *end = page.status();
        return false;
      }
      if (page->empty()) stored_to_ = live_from_;
      for (StoredEvent& each : *page) {
        // What was committed since this stream began comes from the subscription.
        stored_to_ = std::min(each.sequence, live_from_);
        if (each.sequence > live_from_) break;
        if (request_.name().empty() || each.job_name == request_.name())
          stored_.push_back(std::move(each));
      }
    }
    if (!stored_.empty()) {
      const StoredEvent& first = stored_.front();
      *event = v1::JobEvent();
      event->set_kind(v1::JOB_EVENT_KIND_TRANSITION);
      event->set_sequence(first.sequence);
      event->set_resume_token(MakeResumeToken(services_.store_id, first.sequence));
      *event->mutable_job() = first.job;
      event->mutable_time()->set_seconds(static_cast<int64_t>(first.unix_seconds));
      stored_.pop_front();
      return true;
    }
    // The status first: what was queued before the end is still delivered.
    const Status status = subscription_->end_status();
    std::optional<v1::JobEvent> next = subscription_->Pop();
    if (!next) {
      *end = status;
      return false;
    }
    *event = std::move(*next);
    return true;
  }

  void Unhook() override {
    if (subscription_ != nullptr) subscription_->SetNotify({});
  }

  static constexpr int kStoredPage = 256;
  ServiceContext& services_;
  const v1::WatchJobsRequest request_;
  std::shared_ptr<Subscription> subscription_;
  std::deque<JobView::JobPointer> snapshot_ OOM_GUARDED_BY(mutex_);
  bool bookmark_due_ OOM_GUARDED_BY(mutex_) = false;
  std::deque<StoredEvent> stored_ OOM_GUARDED_BY(mutex_);
  int64_t stored_to_ OOM_GUARDED_BY(mutex_) = 0;
  int64_t live_from_ OOM_GUARDED_BY(mutex_) = 0;
};

class LogStream final : public Stream<v1::LogChunk> {
 public:
  LogStream(ServiceContext& services, const v1::StreamLogsRequest& request,
            LogReader::Options options)
      : services_(services), request_(request), reader_(std::move(options)) {}

  void Begin() {
    {
      const MutexLock lock(mutex_);
      ready_ = true;
    }
    Poll();
  }

 private:
  // Files have no events that work everywhere, so a follower looks again.
  void Poll() {
    Pump();
    const MutexLock lock(alarm_mutex_);
    if (unhooked_ || !request_.follow()) return;
    const std::weak_ptr<Stream> weak = this->weak_from_this();
    alarm_.Set(std::chrono::system_clock::now() + services_.log_poll_interval, [weak](bool) {
      if (const std::shared_ptr<Stream> stream = weak.lock())
        static_cast<LogStream*>(stream.get())->Poll();
    });
  }

  bool Next(v1::LogChunk* chunk, Status* end) override OOM_REQUIRES(mutex_) {
    if (services_.stopping) {
      *end = DaemonStopping();
      return false;
    }
    // The state first: what a job wrote before it ended is all there when the end is seen.
    const JobView::JobPointer job = services_.view->Get(request_.name());
    const bool last = !request_.follow() || job == nullptr || IsTerminal(job->state());
    Result<std::optional<LogLine>> line = reader_.Next(/*flush=*/last);
    if (!line.ok()) {
      *end = line.status();
      return false;
    }
    if (!line->has_value()) {
      complete_ = last;
      return false;
    }
    chunk->set_rank((*line)->rank);
    chunk->set_attempt((*line)->attempt);
    chunk->set_offset_bytes((*line)->offset_bytes);
    chunk->set_line(std::move((*line)->line));
    return true;
  }

  void Unhook() override {
    const MutexLock lock(alarm_mutex_);
    unhooked_ = true;
    alarm_.Cancel();
  }

  ServiceContext& services_;
  const v1::StreamLogsRequest request_;
  LogReader reader_ OOM_GUARDED_BY(mutex_);
  Mutex alarm_mutex_;
  bool unhooked_ OOM_GUARDED_BY(alarm_mutex_) = false;
  grpc::Alarm alarm_ OOM_GUARDED_BY(alarm_mutex_);
};

}  // namespace

grpc::ServerWriteReactor<v1::JobEvent>* WatchJobs(ServiceContext& services,
                                                  grpc::CallbackServerContext& context,
                                                  const v1::WatchJobsRequest& request) {
  auto stream = std::make_shared<WatchStream>(services, request);
  stream->Hold();
  Status status = [&]() -> Status {
    OOM_RETURN_IF_ERROR([&] {
      auto caller = services.Authorize(context);
      return caller.ok() ? Status::Ok() : caller.status();
    }());
    return request.name().empty() ? Status::Ok() : CheckJobName(request.name());
  }();
  if (!status.ok()) {
    stream->End(status);
  } else {
    services.loop->Post([stream](Controller& controller) { stream->Begin(controller); });
  }
  return stream.get();
}

grpc::ServerWriteReactor<v1::LogChunk>* StreamLogs(ServiceContext& services,
                                                   grpc::CallbackServerContext& context,
                                                   const v1::StreamLogsRequest& request) {
  LogReader::Options options;
  const Status status = [&]() -> Status {
    const Result<uid_t> caller = services.Authorize(context);
    if (!caller.ok()) return caller.status();
    OOM_RETURN_IF_ERROR(CheckJobName(request.name()));
    if (request.since_offset_bytes() < 0 || request.tail_lines() < 0) {
      return Status(Code::kInvalidArgument, "since_offset_bytes and tail_lines are not negative")
          .WithReason("INVALID_INPUT")
          .WithField(request.tail_lines() < 0 ? "tail_lines" : "since_offset_bytes");
    }
    const JobView::JobPointer job = services.view->Get(request.name());
    if (job == nullptr) {
      return Status(Code::kNotFound, "there is no job \"" + request.name() + "\"")
          .WithReason("JOB_NOT_FOUND")
          .WithField(request.name());
    }
    options = {.directory = job->spec().output() + "/logs",
               .ranks = {request.ranks().begin(), request.ranks().end()},
               .since_offset_bytes = request.since_offset_bytes(),
               .tail_lines = request.tail_lines()};
    return Status::Ok();
  }();
  auto stream = std::make_shared<LogStream>(services, request, std::move(options));
  stream->Hold();
  if (status.ok()) {
    stream->Begin();
  } else {
    stream->End(status);
  }
  return stream.get();
}

}  // namespace oom
