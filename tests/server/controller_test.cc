#include "server/oomd/controller.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "runtime/base/units.h"
#include "server/oomd/job_state.h"
#include "tests/server/fake_launcher.h"
#include "tests/server/memory_store.h"

namespace oom {
namespace {

using internal::v1::Transition;

// One daemon after another over one store and one set of host processes.
class ControllerTest : public testing::Test {
 protected:
  ControllerTest() { Restart(); }

  void Restart() {
    controller_.reset();
    events_ = std::make_unique<EventLog>();
    view_ = std::make_unique<JobView>();
    Controller::Options options = options_;
    options.seed = ++seed_;
    controller_ = std::make_unique<Controller>(
        options,
        Controller::Parts{&clock_, &store_, &launcher_, &observer_, events_.get(), view_.get()});
    const Status status = controller_->Recover();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  static Controller::NewJob NewJob(const std::string& id, int64_t bytes = 1_GiB, int priority = 0) {
    Controller::NewJob job;
    job.job_id = id;
    job.owner = 7;
    job.job.mutable_spec()->set_name(id.empty() ? "some name" : id);
    job.job.mutable_spec()->set_steps(100);
    job.job.mutable_spec()->set_priority(priority);
    job.job.mutable_spec()->mutable_devices()->set_count(1);
    internal::v1::Pool pool;
    pool.set_name("state");
    pool.set_bytes(bytes);
    job.pools.push_back(pool);
    return job;
  }
  Result<v1::Job> Create(Controller::NewJob job) {
    Result<v1::Job> answer = Status(Code::kInternal, "no answer");
    controller_->CreateJob(std::move(job),
                           [&](Result<v1::Job> reply) { answer = std::move(reply); });
    controller_->Flush();
    return answer;
  }
  Result<v1::Job> Cancel(const std::string& id, v1::CancelMode mode = v1::CANCEL_MODE_CHECKPOINT) {
    v1::CancelJobRequest request;
    request.set_name("jobs/" + id);
    request.set_mode(mode);
    Result<v1::Job> answer = Status(Code::kInternal, "no answer");
    controller_->CancelJob(request, [&](Result<v1::Job> reply) { answer = std::move(reply); });
    controller_->Flush();
    return answer;
  }
  Result<v1::Job> Call(void (Controller::*method)(const std::string&, Controller::Reply),
                       const std::string& id) {
    Result<v1::Job> answer = Status(Code::kInternal, "no answer");
    ((*controller_).*method)("jobs/" + id,
                             [&](Result<v1::Job> reply) { answer = std::move(reply); });
    controller_->Flush();
    return answer;
  }
  v1::Job Get(const std::string& id) {
    const JobView::JobPointer job = view_->Get("jobs/" + id);
    return job == nullptr ? v1::Job() : *job;
  }
  std::string State(const std::string& id) { return StateName(Get(id).state()); }
  void Hello(const std::string& id) {
    internal::v1::HostHello hello;
    hello.set_uid(Get(id).uid());
    controller_->OnHello(hello.uid(), hello);
    controller_->Flush();
  }
  void Report(const std::string& id, int64_t number, v1::JobState state, int64_t durable_step = 0) {
    Transition transition;
    transition.set_number(number);
    transition.set_state(state);
    transition.set_durable_step(durable_step);
    transition.set_step(durable_step);
    controller_->OnTransition(Get(id).uid(), transition);
    controller_->Flush();
  }
  void Exit(const std::string& id) {
    const std::string uid = Get(id).uid();
    launcher_.alive.erase(uid);
    controller_->OnExit(uid);
    controller_->Flush();
  }
  void Advance(double seconds) {
    clock_.now += seconds;
    controller_->OnTimer();
  }
  int Acks(const std::string& id, int64_t number) {
    int count = 0;
    for (const FakeLauncher::Sent& sent : launcher_.sent) {
      count +=
          sent.uid == Get(id).uid() && sent.frame.has_ack() && sent.frame.ack().number() == number
              ? 1
              : 0;
    }
    return count;
  }
  const internal::v1::Stop* LastStop() {
    for (auto it = launcher_.sent.rbegin(); it != launcher_.sent.rend(); ++it) {
      if (it->frame.has_stop()) return &it->frame.stop();
    }
    return nullptr;
  }

  Controller::Options options_{
      .node = {.capacity_bytes = {4_GiB}, .device_counts = {{v1::DEVICE_KIND_CPU, 4}}},
      .job_directory_root = "/state/jobs"};
  FakeClock clock_;
  MemoryStore store_;
  FakeLauncher launcher_;
  FakeObserver observer_;
  std::unique_ptr<EventLog> events_;
  std::unique_ptr<JobView> view_;
  std::unique_ptr<Controller> controller_;
  uint64_t seed_ = 0;
};

TEST_F(ControllerTest, AJobRunsFromQueuedToSucceededAndGivesEverythingBack) {
  const Result<v1::Job> created = Create(NewJob("a"));
  ASSERT_TRUE(created.ok());
  EXPECT_EQ(created->state(), v1::JOB_STATE_QUEUED);
  ASSERT_EQ(launcher_.starts.size(), 1U);
  EXPECT_EQ(launcher_.starts[0].first_attempt(), 1);
  EXPECT_EQ(launcher_.starts[0].job_directory(), "/state/jobs/" + created->uid());
  EXPECT_EQ(State("a"), "STARTING");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 1_GiB);
  Hello("a");
  Report("a", 1, v1::JOB_STATE_STARTING);
  Report("a", 2, v1::JOB_STATE_RUNNING);
  Report("a", 3, v1::JOB_STATE_STOPPING, 100);
  Report("a", 4, v1::JOB_STATE_SUCCEEDED, 100);
  EXPECT_EQ(State("a"), "SUCCEEDED");
  EXPECT_EQ(Get("a").progress(), 1.0);
  EXPECT_TRUE(Get("a").has_end_time());
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
  EXPECT_TRUE(launcher_.with_pools.empty());
  Exit("a");
  EXPECT_EQ(State("a"), "SUCCEEDED");
  EXPECT_TRUE(controller_->idle());
}

TEST_F(ControllerTest, ATransitionIsRecordedOnceAndAcknowledgedEachTime) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  const size_t events = store_.events.size();
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(store_.events.size(), events);
  EXPECT_EQ(Acks("a", 1), 2);
}

TEST_F(ControllerTest, ATerminalStateNeverChanges) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  Report("a", 2, v1::JOB_STATE_FAILED);
  Report("a", 3, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Acks("a", 3), 1) << "an ignored transition must not be repeated for ever";
  EXPECT_EQ(Cancel("a").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Call(&Controller::SuspendJob, "a").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Call(&Controller::ResumeJob, "a").status().code(), Code::kFailedPrecondition);
}

TEST_F(ControllerTest, TheSecondJobWaitsForMemoryAndStartsWhenItIsFree) {
  ASSERT_TRUE(Create(NewJob("a", 3_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("b", 3_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("c", 1_GiB)).ok());
  EXPECT_EQ(Get("b").reason(), "WAITING_RESOURCES");
  EXPECT_EQ(Get("b").blocked_by(),
            "host memory of numa 0: needs 3.00 GiB, 1.00 GiB of 4.00 GiB free");
  EXPECT_EQ(Get("c").reason(), "WAITING_PRIORITY");
  EXPECT_EQ(Get("c").blocked_by(), "jobs/b starts first");
  EXPECT_EQ(Get("c").jobs_ahead(), 1);
  Report("a", 1, v1::JOB_STATE_RUNNING);
  Report("a", 2, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(State("b"), "STARTING");
  EXPECT_EQ(State("c"), "STARTING");
}

TEST_F(ControllerTest, HigherPriorityStartsFirst) {
  ASSERT_TRUE(Create(NewJob("running", 4_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("low", 4_GiB, -5)).ok());
  ASSERT_TRUE(Create(NewJob("high", 4_GiB, 5)).ok());
  ASSERT_TRUE(Cancel("running", v1::CANCEL_MODE_NOW).ok());
  Exit("running");
  EXPECT_EQ(State("high"), "STARTING");
  EXPECT_EQ(State("low"), "QUEUED");
}

TEST_F(ControllerTest, AJobThatCanNeverFitIsRefusedWithTheNumbers) {
  const Result<v1::Job> created = Create(NewJob("big", 5_GiB));
  ASSERT_FALSE(created.ok());
  EXPECT_EQ(created.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(created.status().reason(), "OUT_OF_HOST_MEMORY");
  EXPECT_NE(created.status().message().find("5.00 GiB"), std::string::npos)
      << created.status().message();
  EXPECT_TRUE(store_.jobs.empty());
}

TEST_F(ControllerTest, ARepeatedRequestIdGivesTheFirstAnswerAlsoAfterARestart) {
  Controller::NewJob job = NewJob("");
  job.request_id = "r1";
  job.payload_hash = 11;
  const Result<v1::Job> first = Create(job);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->name(), "jobs/some-name");
  // Twice within one commit, too.
  Controller::NewJob other = NewJob("");
  other.request_id = "r2";
  std::vector<std::string> uids;
  for (int i = 0; i < 2; ++i) {
    controller_->CreateJob(other, [&](Result<v1::Job> reply) { uids.push_back(reply->uid()); });
  }
  controller_->Flush();
  ASSERT_EQ(uids.size(), 2U);
  EXPECT_EQ(uids[0], uids[1]);
  Restart();
  const Result<v1::Job> again = Create(job);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->SerializeAsString(), first->SerializeAsString());
  job.payload_hash = 12;
  const Result<v1::Job> changed = Create(job);
  EXPECT_EQ(changed.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(changed.status().reason(), "REQUEST_ID_REUSED");
  EXPECT_EQ(store_.jobs.size(), 2U);
}

TEST_F(ControllerTest, ValidateOnlyWritesNothing) {
  Controller::NewJob job = NewJob("a");
  job.validate_only = true;
  job.request_id = "r";
  const int commits = store_.commit_count;
  const Result<v1::Job> answer = Create(job);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->name(), "jobs/a");
  EXPECT_EQ(answer->uid(), "");
  EXPECT_EQ(store_.commit_count, commits);
  EXPECT_TRUE(store_.jobs.empty() && store_.requests.empty());
}

TEST_F(ControllerTest, NamesAreCheckedAndMadeUnique) {
  EXPECT_EQ(Create(NewJob("Bad_Name")).status().code(), Code::kInvalidArgument);
  ASSERT_TRUE(Create(NewJob("a", 1_MiB)).ok());
  EXPECT_EQ(Create(NewJob("a", 1_MiB)).status().code(), Code::kAlreadyExists);
  EXPECT_EQ(Create(NewJob("", 1_MiB))->name(), "jobs/some-name");
  EXPECT_EQ(Create(NewJob("", 1_MiB))->name(), "jobs/some-name-2");
}

TEST_F(ControllerTest, ManyChangesAreOneCommit) {
  const int before = store_.commit_count;
  int answers = 0;
  for (int i = 0; i < 50; ++i) {
    controller_->CreateJob(NewJob("j" + std::to_string(i), 4_GiB),
                           [&](Result<v1::Job> reply) { answers += reply.ok(); });
  }
  EXPECT_EQ(answers, 0) << "acknowledged before the commit";
  controller_->Flush();
  EXPECT_EQ(answers, 50);
  EXPECT_EQ(store_.commit_count, before + 2) << "the jobs, and the first one's start";
}

TEST_F(ControllerTest, AFailedCommitChangesNothingAndRefusesEverythingAfterIt) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  store_.fail_from_now = true;
  const Result<v1::Job> created = Create(NewJob("b"));
  EXPECT_EQ(created.status().code(), Code::kUnavailable);
  EXPECT_EQ(view_->Get("jobs/b"), nullptr);
  EXPECT_EQ(launcher_.starts.size(), 1U);
  EXPECT_TRUE(controller_->store_failed());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "STARTING") << "memory is ahead of the disk";
  EXPECT_EQ(Acks("a", 1), 0);
  EXPECT_EQ(Cancel("a").status().code(), Code::kUnavailable);
  // After the repair the daemon starts from what the disk has.
  store_.fail_from_now = false;
  Restart();
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "RUNNING");
  EXPECT_TRUE(Create(NewJob("b")).ok());
}

TEST_F(ControllerTest, CancelWithCheckpointThenCancelAgainMeansNow) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Hello("a");
  Report("a", 1, v1::JOB_STATE_RUNNING);
  ASSERT_TRUE(Cancel("a").ok());
  EXPECT_EQ(State("a"), "STOPPING");
  EXPECT_EQ(Get("a").reason(), "USER_CANCEL");
  ASSERT_NE(LastStop(), nullptr);
  EXPECT_TRUE(LastStop()->checkpoint());
  EXPECT_EQ(LastStop()->grace_seconds(), 60);
  EXPECT_EQ(LastStop()->final_state(), v1::JOB_STATE_CANCELLED);
  ASSERT_TRUE(Cancel("a").ok());
  EXPECT_FALSE(LastStop()->checkpoint());
  EXPECT_EQ(LastStop()->grace_seconds(), 0);
  EXPECT_TRUE(launcher_.killed.empty());
  Advance(29);
  EXPECT_TRUE(launcher_.killed.empty());
  Advance(2);
  EXPECT_EQ(launcher_.killed.size(), 1U);
  Exit("a");
  EXPECT_EQ(State("a"), "CANCELLED");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
}

TEST_F(ControllerTest, WhatTheHostSaidBeforeItHeardOfTheStopDoesNotUndoTheStop) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  ASSERT_TRUE(Cancel("a").ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  EXPECT_EQ(State("a"), "STOPPING");
  EXPECT_EQ(Acks("a", 1), 1);
  launcher_.sent.clear();
  Hello("a");
  ASSERT_NE(LastStop(), nullptr) << "a host that connects after the cancel must hear of it";
  Report("a", 2, v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(State("a"), "CANCELLED");
}

TEST_F(ControllerTest, AStopOutlivesTheDaemon) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  ASSERT_TRUE(Call(&Controller::SuspendJob, "a").ok());
  launcher_.sent.clear();
  Restart();
  EXPECT_EQ(State("a"), "STOPPING");
  Hello("a");
  ASSERT_NE(LastStop(), nullptr);
  EXPECT_EQ(LastStop()->final_state(), v1::JOB_STATE_SUSPENDED);
  Report("a", 2, v1::JOB_STATE_SUSPENDED, 40);
  EXPECT_EQ(State("a"), "SUSPENDED");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
  // Resumed while the old host is still on its way out: the new one waits for that.
  ASSERT_TRUE(Call(&Controller::ResumeJob, "a").ok());
  EXPECT_EQ(State("a"), "QUEUED");
  EXPECT_EQ(launcher_.starts.size(), 1U);
  Exit("a");
  EXPECT_EQ(State("a"), "STARTING");
  ASSERT_EQ(launcher_.starts.size(), 2U);
  EXPECT_EQ(launcher_.starts[1].first_attempt(), 2);
  EXPECT_EQ(launcher_.starts[1].next_transition(), 3);
}

TEST_F(ControllerTest, ACancelledEtagMismatchIsAborted) {
  const Result<v1::Job> created = Create(NewJob("a"));
  v1::CancelJobRequest request;
  request.set_name("jobs/a");
  request.set_etag(created->etag());  // It has started since.
  Status status;
  controller_->CancelJob(request, [&](Result<v1::Job> reply) { status = reply.status(); });
  EXPECT_EQ(status.code(), Code::kAborted);
  EXPECT_EQ(State("a"), "STARTING");
}

TEST_F(ControllerTest, ALostHostIsReplacedAfterABackoffUntilTheBudgetIsUsed) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  for (int failure = 1; failure <= 4; ++failure) {
    Report("a", failure, v1::JOB_STATE_RUNNING, failure * 10);
    Exit("a");
    EXPECT_EQ(Get("a").failure_count(), failure);
    if (failure == 4) break;
    EXPECT_EQ(State("a"), "RECOVERING");
    EXPECT_EQ(Get("a").reason(), "JOB_HOST_LOST");
    EXPECT_EQ(controller_->resources().used_bytes()[0], 1_GiB) << "the pools stay with the job";
    EXPECT_TRUE(launcher_.with_pools.contains(Get("a").uid()));
    Advance(600);
    ASSERT_EQ(launcher_.starts.size(), static_cast<size_t>(failure) + 1);
    EXPECT_EQ(launcher_.starts.back().first_attempt(), failure + 1);
    EXPECT_EQ(launcher_.starts.back().failure_count(), failure);
  }
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Get("a").reason(), "RETRIES_EXHAUSTED");
  EXPECT_TRUE(launcher_.with_pools.empty());
}

TEST_F(ControllerTest, TwoFailuresInARowAtOneDurableStepEndTheJob) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING, 20);
  Exit("a");
  EXPECT_EQ(State("a"), "RECOVERING");
  Restart();  // The memory of the first failure is on the disk.
  EXPECT_EQ(State("a"), "RECOVERING");
  EXPECT_EQ(Get("a").failure_count(), 1);
  Advance(600);
  Report("a", 2, v1::JOB_STATE_RUNNING, 20);
  Exit("a");
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Get("a").reason(), "RETRIES_EXHAUSTED");
  EXPECT_NE(Get("a").message().find("durable step 20"), std::string::npos) << Get("a").message();
}

TEST_F(ControllerTest, ACancelBetweenTwoHostsEndsTheJobAtOnce) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Exit("a");
  ASSERT_EQ(State("a"), "RECOVERING");
  ASSERT_TRUE(Cancel("a").ok());
  EXPECT_EQ(State("a"), "CANCELLED");
  Advance(1000);
  EXPECT_EQ(launcher_.starts.size(), 1U);
}

TEST_F(ControllerTest, ADaemonThatDiedBetweenCommitAndStartStartsTheJobLater) {
  launcher_.start_status = Status(Code::kInternal, "never reached");
  ASSERT_TRUE(Create(NewJob("a")).ok());
  // What the disk had when the daemon died: STARTING, and no host.
  JobRecord& record = store_.jobs.begin()->second;
  record.job.set_state(v1::JOB_STATE_STARTING);
  launcher_.start_status = Status::Ok();
  Restart();
  EXPECT_EQ(State("a"), "STARTING");
  EXPECT_EQ(launcher_.starts.size(), 1U);
  EXPECT_EQ(Get("a").failure_count(), 0);
}

TEST_F(ControllerTest, AnEndThatTheHostWroteDownBeforeItDiedCounts) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  Transition last;
  last.set_number(2);
  last.set_state(v1::JOB_STATE_SUCCEEDED);
  last.set_durable_step(100);
  launcher_.leftovers[Get("a").uid()] = {last};
  launcher_.alive.clear();
  Restart();
  EXPECT_EQ(State("a"), "SUCCEEDED");
  EXPECT_EQ(Get("a").durable_step(), 100);
}

TEST_F(ControllerTest, AHostThatDoesNotLaunchFailsItsJobAndFreesItsPlace) {
  launcher_.start_status = Status(Code::kResourceExhausted, "no memory");
  ASSERT_TRUE(Create(NewJob("a")).ok());
  EXPECT_EQ(State("a"), "FAILED");
  EXPECT_EQ(Get("a").reason(), "OUT_OF_HOST_MEMORY");
  EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
}

TEST_F(ControllerTest, ACheckpointIsAnsweredWhenItIsDurable) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Result<internal::v1::CheckpointDone> answer = Status(Code::kInternal, "none");
  const auto ask = [&] {
    controller_->CheckpointJob(
        "jobs/a", [&](Result<internal::v1::CheckpointDone> done) { answer = std::move(done); });
  };
  ask();
  EXPECT_EQ(answer.status().code(), Code::kFailedPrecondition);
  Hello("a");
  Report("a", 1, v1::JOB_STATE_RUNNING);
  ask();
  ASSERT_TRUE(launcher_.sent.back().frame.has_checkpoint());
  internal::v1::CheckpointDone done;
  done.set_request(launcher_.sent.back().frame.checkpoint().request());
  done.set_step(30);
  done.set_path("/out/checkpoints/step-00000030");
  controller_->OnCheckpointDone(Get("a").uid(), done);
  EXPECT_FALSE(answer.ok()) << "answered before it was recorded";
  controller_->Flush();
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->step(), 30);
  EXPECT_EQ(store_.jobs.begin()->second.job.durable_step(), 30);
  ask();
  Report("a", 2, v1::JOB_STATE_FAILED);
  EXPECT_EQ(answer.status().code(), Code::kAborted);
}

TEST_F(ControllerTest, AnEphemeralDaemonSuspendsItsJobsAndTheNextOneQueuesThemAgain) {
  options_.ephemeral = true;
  Restart();
  ASSERT_TRUE(Create(NewJob("a", 4_GiB)).ok());
  ASSERT_TRUE(Create(NewJob("b", 4_GiB)).ok());
  Hello("a");
  Report("a", 1, v1::JOB_STATE_RUNNING);
  controller_->BeginShutdown();
  EXPECT_EQ(State("a"), "STOPPING");
  EXPECT_TRUE(LastStop()->checkpoint());
  EXPECT_FALSE(controller_->idle());
  EXPECT_EQ(Create(NewJob("c")).status().code(), Code::kUnavailable);
  Report("a", 2, v1::JOB_STATE_SUSPENDED, 12);
  Exit("a");
  EXPECT_TRUE(controller_->idle());
  EXPECT_EQ(State("b"), "QUEUED") << "nothing starts during a shutdown";
  Restart();
  EXPECT_EQ(State("a"), "STARTING");
  EXPECT_EQ(Get("a").durable_step(), 12);
}

TEST_F(ControllerTest, AServiceDaemonLeavesJobsAloneWhenItStops) {
  ASSERT_TRUE(Create(NewJob("a")).ok());
  Report("a", 1, v1::JOB_STATE_RUNNING);
  controller_->BeginShutdown();
  EXPECT_EQ(LastStop(), nullptr);
  Restart();
  EXPECT_EQ(State("a"), "RUNNING");
  EXPECT_EQ(launcher_.starts.size(), 1U);
}

// Goal: whatever happens in whatever order, the promises of the store hold.
// Method: random histories of submissions, cancels, suspends, transitions, crashes of hosts and of
// the daemon, over one seed each; after each step: event numbers have no hole, a terminal job never
// changes, no job has two hosts, and accounts equal the sum over active jobs. At the end everything
// can be brought to an end.
TEST_F(ControllerTest, RandomHistoriesKeepEveryPromise) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    store_ = MemoryStore();
    launcher_ = FakeLauncher();
    Restart();
    std::map<std::string, int64_t> numbers;         // By uid: the host's last transition.
    std::map<std::string, std::string> final_jobs;  // By uid, as first seen terminal.
    int jobs = 0;
    const auto check = [&] {
      int64_t expected = 0;
      for (const StoredEvent& event : store_.events) ASSERT_EQ(event.sequence, ++expected);
      int64_t used = 0;
      for (const auto& [uid, record] : store_.jobs) {
        const v1::JobState state = record.job.state();
        if (IsActive(state)) used += record.pools[0].bytes();
        if (!IsTerminal(state)) continue;
        const auto [it, first] = final_jobs.emplace(uid, record.job.SerializeAsString());
        ASSERT_EQ(it->second, record.job.SerializeAsString()) << "a terminal job changed";
        ASSERT_FALSE(launcher_.with_pools.contains(uid)) << "a terminal job holds pools";
      }
      ASSERT_EQ(controller_->resources().used_bytes()[0], used);
      ASSERT_LE(used, 4_GiB);
    };
    const auto pick = [&]() -> std::string {
      if (store_.jobs.empty()) return "none";
      auto it = store_.jobs.begin();
      std::advance(it, below(store_.jobs.size()));
      return it->second.id();
    };
    for (int step = 0; step < 120; ++step) {
      const std::string id = pick();
      const std::string uid = Get(id).uid();
      switch (below(9)) {
        case 0:
          static_cast<void>(Create(NewJob("j" + std::to_string(jobs++), (1 + below(4)) * 1_GiB,
                                          static_cast<int>(below(3)))));
          break;
        case 1:
          static_cast<void>(
              Cancel(id, below(2) == 0 ? v1::CANCEL_MODE_NOW : v1::CANCEL_MODE_CHECKPOINT));
          break;
        case 2:
          static_cast<void>(
              Call(below(2) == 0 ? &Controller::SuspendJob : &Controller::ResumeJob, id));
          break;
        case 3:
        case 4:
        case 5:
          if (launcher_.alive.contains(uid)) {
            // Any state at all, also repeated and wrong ones: a host is another program.
            const auto state = static_cast<v1::JobState>(1 + below(9));
            const int64_t number = below(4) == 0 ? numbers[uid] : ++numbers[uid];
            Report(id, number, state, static_cast<int64_t>(below(50)));
            if (below(3) == 0) Hello(id);
          }
          break;
        case 6:
          if (launcher_.alive.contains(uid)) Exit(id);
          break;
        case 7:
          Advance(static_cast<double>(below(700)));
          for (const std::string& victim : std::vector<std::string>(launcher_.killed)) {
            if (launcher_.alive.erase(victim) != 0) controller_->OnExit(victim);
          }
          controller_->Flush();
          break;
        case 8:
          // The daemon dies; hosts may die meanwhile.
          if (below(2) == 0 && !uid.empty()) launcher_.alive.erase(uid);
          Restart();
          break;
      }
      check();
      if (HasFatalFailure()) return;
    }
    for (int round = 0; round < 6; ++round) {
      for (const auto& [uid, record] : std::map<std::string, JobRecord>(store_.jobs)) {
        if (!IsTerminal(record.job.state()))
          static_cast<void>(Cancel(record.id(), v1::CANCEL_MODE_NOW));
      }
      for (const std::string& uid : std::set<std::string>(launcher_.alive)) {
        launcher_.alive.erase(uid);
        controller_->OnExit(uid);
      }
      Advance(700);
    }
    check();
    for (const auto& [uid, record] : store_.jobs)
      EXPECT_TRUE(IsTerminal(record.job.state())) << StateName(record.job.state());
    EXPECT_EQ(controller_->resources().used_bytes()[0], 0);
    EXPECT_TRUE(launcher_.with_pools.empty());
  }
}

}  // namespace
}  // namespace oom
