// EventLog hands committed events to watchers. A watcher that falls 1,024 events behind is ended
// with kResourceExhausted and resumes from its last token; the control loop never waits for one.
// Progress is not an event: of it (and of bookmarks) only the newest for each job is kept for a
// watcher. EventLog belongs to the control thread; a Subscription is thread-safe and outlives the
// log.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oom/v1/job.pb.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"

namespace oom {

// Tokens are opaque to clients: the store's id and an event number.
std::string MakeResumeToken(const std::string& store_id, int64_t sequence);
// Fails with kInvalidArgument on anything else than a token of this store.
Result<int64_t> ParseResumeToken(const std::string& store_id, const std::string& token);

class Subscription {
 public:
  static constexpr size_t kMaxQueued = 1024;

  // `job_name` empty: every job.
  explicit Subscription(std::string job_name) : job_name_(std::move(job_name)) {}

  // The next event: transitions in order before progress. Empty if there is none now.
  std::optional<v1::JobEvent> Pop();
  // OK while it is live. After the end, what is still queued can be popped.
  Status end_status() const;
  // `notify` runs, on the publisher's thread and without locks, when an event arrives or the stream
  // ends; at once if one is there already. Empty: not any more; returns after a running call.
  void SetNotify(std::function<void()> notify);
  void End(Status status);

 private:
  friend class EventLog;
  void Push(const v1::JobEvent& event);
  void Notify();

  const std::string job_name_;
  Mutex notify_mutex_;
  std::function<void()> notify_ OOM_GUARDED_BY(notify_mutex_);
  mutable Mutex mutex_;
  std::deque<v1::JobEvent> queue_ OOM_GUARDED_BY(mutex_);
  std::map<std::string, v1::JobEvent> progress_ OOM_GUARDED_BY(mutex_);
  int64_t last_queued_sequence_ OOM_GUARDED_BY(mutex_) = 0;
  int64_t last_popped_sequence_ OOM_GUARDED_BY(mutex_) = 0;
  std::string last_popped_token_ OOM_GUARDED_BY(mutex_);
  Status end_status_ OOM_GUARDED_BY(mutex_);
};

class EventLog {
 public:
  std::shared_ptr<Subscription> Subscribe(const std::string& job_name);
  void Publish(const v1::JobEvent& event);
  // Ends every stream.
  void EndAll(const Status& status);
  size_t watcher_count();
  int64_t overflow_count() const { return overflow_count_; }

 private:
  std::vector<std::weak_ptr<Subscription>> subscriptions_;
  int64_t overflow_count_ = 0;
};

}  // namespace oom
