// One controller after another over one store and one set of host processes, all in memory, as
// daemons follow each other on one disk; and short words for what a client, a job host and the
// clock do to it. Single-threaded.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/base/units.h"
#include "server/oomd/controller.h"
#include "tests/server/fake_launcher.h"
#include "tests/server/memory_store.h"

namespace oom {

class ControllerTest : public testing::Test {
 protected:
  ControllerTest() { Restart(); }

  // The daemon dies, and the next one recovers with `options_`.
  void Restart();

  static Controller::NewJob NewJob(const std::string& id, int64_t bytes = 1_GiB, int priority = 0);

  // What a client asks for, and the answer after the commit.
  Result<v1::Job> Create(Controller::NewJob job);
  Result<v1::Job> Cancel(const std::string& id, v1::CancelMode mode = v1::CANCEL_MODE_CHECKPOINT);
  Result<v1::Job> Call(void (Controller::*method)(const std::string&, Controller::Reply),
                       const std::string& id);
  v1::Job Get(const std::string& id);
  std::string State(const std::string& id);

  // What the job's host says, and its end.
  void Hello(const std::string& id);
  void Report(const std::string& id, int64_t number, v1::JobState state, int64_t durable_step = 0);
  void Exit(const std::string& id);

  void Advance(double seconds);

  // What was sent to hosts: how often transition `number` was acknowledged, and the last stop or
  // nullptr.
  int Acks(const std::string& id, int64_t number);
  const internal::v1::Stop* LastStop();

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

}  // namespace oom
