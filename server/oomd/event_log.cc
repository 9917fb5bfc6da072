#include "server/oomd/event_log.h"

#include <cstdlib>

namespace oom {

std::string MakeResumeToken(const std::string& store_id, int64_t sequence) {
  return store_id + "." + std::to_string(sequence);
}

Result<int64_t> ParseResumeToken(const std::string& store_id, const std::string& token) {
  const size_t dot = token.find('.');
  const auto bad = [](const char* what) {
    return Status(Code::kInvalidArgument, what)
        .WithReason("BAD_RESUME_TOKEN")
        .WithField("resume_token");
  };
  if (dot == std::string::npos || dot + 1 == token.size() || token.size() - dot > 19 ||
      token.find_first_not_of("0123456789", dot + 1) != std::string::npos) {
    return bad("resume_token is not one that this service gave out");
  }
  if (token.substr(0, dot) != store_id)
    return bad("resume_token belongs to another job store; watch without one");
  return static_cast<int64_t>(std::strtoll(token.c_str() + dot + 1, nullptr, 10));
}

std::optional<v1::JobEvent> Subscription::Pop() {
  const MutexLock lock(mutex_);
  if (!queue_.empty()) {
    v1::JobEvent event = std::move(queue_.front());
    queue_.pop_front();
    last_popped_sequence_ = event.sequence();
    last_popped_token_ = event.resume_token();
    return event;
  }
  if (progress_.empty()) return std::nullopt;
  v1::JobEvent event = std::move(progress_.begin()->second);
  progress_.erase(progress_.begin());
  // It was made before events that this watcher has seen since: its token must not lead back before
  // them.
  if (event.sequence() < last_popped_sequence_) {
    event.set_sequence(last_popped_sequence_);
    event.set_resume_token(last_popped_token_);
  }
  return event;
}

Status Subscription::end_status() const {
  const MutexLock lock(mutex_);
  return end_status_;
}

void Subscription::Push(const v1::JobEvent& event) {
  {
    const MutexLock lock(mutex_);
    if (!end_status_.ok()) return;
    const bool bookmark = event.kind() == v1::JOB_EVENT_KIND_BOOKMARK;
    if (!job_name_.empty() && event.job().name() != job_name_ && !bookmark) return;
    if (bookmark || event.kind() == v1::JOB_EVENT_KIND_PROGRESS) {
      progress_[event.job().name()] = event;  // A bookmark has no job.
    } else if (queue_.size() >= kMaxQueued) {
      end_status_ =
          Status(Code::kResourceExhausted,
                 "this watcher is more than " + std::to_string(kMaxQueued) +
                     " events behind; resume after the last one (" +
                     std::to_string(last_queued_sequence_) + " is the last that was queued)")
              .WithReason("WATCH_OVERFLOW");
      progress_.clear();
    } else {
      // A transition says more than the progress before it.
      progress_.erase(event.job().name());
      last_queued_sequence_ = event.sequence();
      queue_.push_back(event);
    }
  }
  Notify();
}

void Subscription::End(Status status) {
  {
    const MutexLock lock(mutex_);
    if (!end_status_.ok()) return;
    end_status_ = std::move(status);
  }
  Notify();
}

void Subscription::Notify() {
  const MutexLock lock(notify_mutex_);
  if (notify_) notify_();
}

void Subscription::SetNotify(std::function<void()> notify) {
  const MutexLock lock(notify_mutex_);
  notify_ = std::move(notify);
  if (notify_) notify_();
}

std::shared_ptr<Subscription> EventLog::Subscribe(const std::string& job_name) {
  auto subscription = std::make_shared<Subscription>(job_name);
  subscriptions_.push_back(subscription);
  return subscription;
}

void EventLog::Publish(const v1::JobEvent& event) {
  std::erase_if(subscriptions_, [&](const std::weak_ptr<Subscription>& weak) {
    const std::shared_ptr<Subscription> subscription = weak.lock();
    if (subscription == nullptr) return true;
    subscription->Push(event);
    if (subscription->end_status().code() != Code::kResourceExhausted) return false;
    ++overflow_count_;
    return true;
  });
}

void EventLog::EndAll(const Status& status) {
  for (const std::weak_ptr<Subscription>& weak : subscriptions_) {
    if (const std::shared_ptr<Subscription> subscription = weak.lock()) subscription->End(status);
  }
  subscriptions_.clear();
}

size_t EventLog::watcher_count() {
  std::erase_if(subscriptions_,
                [](const std::weak_ptr<Subscription>& weak) { return weak.expired(); });
  return subscriptions_.size();
}

}  // namespace oom
