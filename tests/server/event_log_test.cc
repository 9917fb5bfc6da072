#include "server/oomd/event_log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "server/oomd/job_view.h"

namespace oom {
namespace {

v1::JobEvent Event(v1::JobEventKind kind, int64_t sequence, const std::string& job) {
  v1::JobEvent event;
  event.set_kind(kind);
  event.set_sequence(sequence);
  event.set_resume_token(MakeResumeToken("store", sequence));
  event.mutable_job()->set_name(job);
  return event;
}

TEST(EventLogTest, AWatcherThatFallsBehindIsEndedAndOnlyIt) {
  EventLog log;
  const auto slow = log.Subscribe("");
  const auto other_job = log.Subscribe("jobs/other");
  const auto fast = log.Subscribe("");
  const int64_t total = static_cast<int64_t>(Subscription::kMaxQueued) + 10;
  int64_t seen = 0;
  for (int64_t i = 1; i <= total; ++i) {
    log.Publish(Event(v1::JOB_EVENT_KIND_TRANSITION, i, "jobs/a"));
    while (const auto event = fast->Pop()) EXPECT_EQ(event->sequence(), ++seen);
  }
  EXPECT_EQ(seen, total);
  EXPECT_TRUE(fast->end_status().ok());
  EXPECT_TRUE(other_job->end_status().ok());
  EXPECT_FALSE(other_job->Pop().has_value());
  EXPECT_EQ(slow->end_status().code(), Code::kResourceExhausted);
  EXPECT_EQ(slow->end_status().reason(), "WATCH_OVERFLOW");
  // What it has is whole and in order; it resumes after the last of it.
  int64_t last = 0;
  while (const auto event = slow->Pop()) EXPECT_EQ(event->sequence(), ++last);
  EXPECT_EQ(last, static_cast<int64_t>(Subscription::kMaxQueued));
  EXPECT_NE(slow->end_status().message().find("(" + std::to_string(last) + " "), std::string::npos);
  EXPECT_EQ(log.overflow_count(), 1);
}

TEST(EventLogTest, ProgressNeverFillsAQueueAndNeverLeadsBack) {
  EventLog log;
  const auto watcher = log.Subscribe("");
  for (int i = 0; i < 100000; ++i) log.Publish(Event(v1::JOB_EVENT_KIND_PROGRESS, 5, "jobs/a"));
  log.Publish(Event(v1::JOB_EVENT_KIND_BOOKMARK, 5, ""));
  log.Publish(Event(v1::JOB_EVENT_KIND_TRANSITION, 6, "jobs/b"));
  auto event = watcher->Pop();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->sequence(), 6);
  int rest = 0;
  while ((event = watcher->Pop())) {
    ++rest;
    EXPECT_EQ(event->resume_token(), MakeResumeToken("store", 6))
        << "resuming here would repeat event 6";
  }
  EXPECT_EQ(rest, 2);
}

TEST(EventLogTest, NotifiesOnArrivalAndEnd) {
  EventLog log;
  const auto watcher = log.Subscribe("");
  int calls = 0;
  watcher->SetNotify([&] { ++calls; });
  EXPECT_EQ(calls, 1);
  log.Publish(Event(v1::JOB_EVENT_KIND_TRANSITION, 1, "jobs/a"));
  EXPECT_EQ(calls, 2);
  log.EndAll(Status(Code::kUnavailable, "stopping"));
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(watcher->Pop().has_value()) << "what was queued before the end is delivered";
  EXPECT_EQ(watcher->end_status().code(), Code::kUnavailable);
}

// Goal: watchers and readers on other threads see a consistent world; under ThreadSanitizer, no
// race. Method: one publisher, four watchers that come and go, two readers of the view.
TEST(EventLogTest, WatchersAndReadersOnOtherThreadsSeeEveryEventInOrder) {
  constexpr int64_t kEvents = 3000;
  EventLog log;
  JobView view;
  std::vector<std::shared_ptr<Subscription>> watchers;
  for (int i = 0; i < 4; ++i) watchers.push_back(log.Subscribe(""));
  std::atomic<int> finished = 0;
  std::vector<std::thread> threads;
  for (const auto& watcher : watchers) {
    threads.emplace_back([&, watcher] {
      std::atomic<int> notified = 0;
      watcher->SetNotify([&notified] { ++notified; });
      int64_t seen = 0;
      while (seen < kEvents && watcher->end_status().ok()) {
        while (const auto event = watcher->Pop()) {
          EXPECT_GE(event->sequence(), seen);
          seen = event->sequence();
        }
        std::this_thread::yield();
      }
      while (const auto event = watcher->Pop()) seen = event->sequence();
      watcher->SetNotify({});
      EXPECT_TRUE(seen == kEvents || watcher->end_status().code() == Code::kResourceExhausted);
      EXPECT_GT(notified, 0);
      ++finished;
    });
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      int64_t newest = 0;
      while (finished < 4) {
        if (const auto job = view.Get("jobs/a")) {
          EXPECT_GE(job->sequence(), newest);
          newest = job->sequence();
        }
        EXPECT_LE(view.List(0, 10, {}).size(), 1U);
        std::this_thread::yield();
      }
    });
  }
  for (int64_t i = 1; i <= kEvents; ++i) {
    v1::JobEvent event = Event(v1::JOB_EVENT_KIND_TRANSITION, i, "jobs/a");
    event.mutable_job()->set_sequence(i);
    view.Put(1, event.job());
    log.Publish(event);
    if (i % 64 == 0) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ResumeTokenTest, OnlyTokensOfThisStoreAreTaken) {
  EXPECT_EQ(ParseResumeToken("abc", MakeResumeToken("abc", 17)).value(), 17);
  for (const std::string& bad : std::vector<std::string>{"", ".", "abc", "abc.", "abc.-1", "abc.1x",
                                                         "abd.17", "abc.99999999999999999999", "17",
                                                         "abc.1.2", std::string("abc.1\0", 6)}) {
    EXPECT_EQ(ParseResumeToken("abc", bad).ok(), false) << bad;
  }
}

}  // namespace
}  // namespace oom
