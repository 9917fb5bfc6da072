// The controller under random histories: what holds in every state that it can be brought into.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/base/units.h"
#include "server/oomd/job_state.h"
#include "tests/server/controller_fixture.h"

namespace oom {
namespace {

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
