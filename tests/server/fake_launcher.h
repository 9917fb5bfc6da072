// A Launcher without processes, a clock that a test moves, and an observer that remembers.

#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "server/oomd/controller.h"

namespace oom {

class FakeClock : public Clock {
 public:
  double UnixSeconds() const override { return 1.75e9 + now; }
  double MonotonicSeconds() const override { return now; }
  double now = 100;
};

class FakeLauncher : public Launcher {
 public:
  struct Sent {
    std::string uid;
    internal::v1::DaemonFrame frame;
  };

  Status Start(const internal::v1::JobStart& start) override {
    if (!start_status.ok()) return start_status;
    EXPECT_FALSE(alive.contains(start.uid())) << "two hosts of one job";
    starts.push_back(start);
    alive.insert(start.uid());
    with_pools.insert(start.uid());
    return Status::Ok();
  }
  Found Adopt(const std::string& uid) override {
    if (alive.contains(uid)) return Found::kAlive;
    for (const internal::v1::JobStart& start : starts) {
      if (start.uid() == uid) return Found::kDead;
    }
    return Found::kNeverStarted;
  }
  std::vector<internal::v1::Transition> Leftovers(const std::string& uid) override {
    return leftovers[uid];
  }
  void Send(const std::string& uid, const internal::v1::DaemonFrame& frame) override {
    sent.push_back({.uid = uid, .frame = frame});
  }
  void Kill(const std::string& uid) override { killed.push_back(uid); }
  void ReleasePools(const std::string& uid) override { with_pools.erase(uid); }

  Status start_status;
  std::vector<internal::v1::JobStart> starts;
  std::set<std::string> alive;
  std::set<std::string> with_pools;
  std::vector<Sent> sent;
  std::vector<std::string> killed;
  std::map<std::string, std::vector<internal::v1::Transition>> leftovers;
};

class FakeObserver : public Observer {
 public:
  void JobTransitioned(const v1::Job&) override { ++transitions; }
  void QueueWaited(double) override {}
  void Progressed(const v1::Job&, const internal::v1::Progress&) override {}
  void StoreCommitted(double) override {}
  void StoreFailed(const Status&) override { ++store_failures; }
  void Warned(const std::string& message) override { warnings.push_back(message); }

  int transitions = 0;
  int store_failures = 0;
  std::vector<std::string> warnings;
};

}  // namespace oom
