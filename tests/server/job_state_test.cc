#include "server/oomd/job_state.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

namespace oom {
namespace {

using Pair = std::pair<std::string, std::string>;

// Goal: the state machine is this table and nothing else.
// Method: every pair of states against the list of what is allowed.
TEST(JobStateTest, ExactlyTheTabledTransitionsAreAllowed) {
  std::set<Pair> allowed = {
      {"QUEUED", "STARTING"},       {"QUEUED", "SUSPENDED"},    {"QUEUED", "CANCELLED"},
      {"QUEUED", "FAILED"},         {"SUSPENDED", "QUEUED"},    {"SUSPENDED", "CANCELLED"},
      {"STARTING", "STARTING"},     {"STARTING", "RUNNING"},    {"STARTING", "STOPPING"},
      {"STARTING", "RECOVERING"},   {"RUNNING", "RUNNING"},     {"RUNNING", "STOPPING"},
      {"RUNNING", "RECOVERING"},    {"RECOVERING", "STARTING"}, {"RECOVERING", "RUNNING"},
      {"RECOVERING", "STOPPING"},   {"STOPPING", "STOPPING"},   {"STOPPING", "RECOVERING"},
      {"RECOVERING", "RECOVERING"},
  };
  for (const std::string from : {"STARTING", "RUNNING", "RECOVERING", "STOPPING"}) {
    for (const std::string to : {"SUCCEEDED", "FAILED", "CANCELLED", "SUSPENDED"})
      allowed.insert({from, to});
  }
  for (int from = v1::JOB_STATE_QUEUED; from <= v1::JOB_STATE_RECOVERING; ++from) {
    for (int to = v1::JOB_STATE_QUEUED; to <= v1::JOB_STATE_RECOVERING; ++to) {
      const auto a = static_cast<v1::JobState>(from);
      const auto b = static_cast<v1::JobState>(to);
      EXPECT_EQ(MayFollow(a, b), allowed.contains({StateName(a), StateName(b)}))
          << StateName(a) << " -> " << StateName(b);
    }
  }
}

TEST(JobStateTest, NothingFollowsATerminalState) {
  for (int from = v1::JOB_STATE_QUEUED; from <= v1::JOB_STATE_RECOVERING; ++from) {
    const auto state = static_cast<v1::JobState>(from);
    if (!IsTerminal(state)) continue;
    EXPECT_FALSE(IsActive(state));
    for (int to = v1::JOB_STATE_QUEUED; to <= v1::JOB_STATE_RECOVERING; ++to) {
      EXPECT_FALSE(MayFollow(state, static_cast<v1::JobState>(to))) << StateName(state);
    }
  }
}

}  // namespace
}  // namespace oom
