#include "tests/graph/graph_fixture.h"

#include <string>

namespace oom::testing {

bool UsesWeights(NodeKind kind) {
  return kind == NodeKind::kForwardMixer || kind == NodeKind::kForwardMixture ||
         kind == NodeKind::kHead || kind == NodeKind::kEvaluationHead ||
         kind == NodeKind::kReplayMixer || kind == NodeKind::kReplayMixture ||
         kind == NodeKind::kBackwardMixture || kind == NodeKind::kBackwardMixer;
}

void GraphTest::ForJobs(const std::function<void(const TestJob&)>& check, JobShape shape) {
  for (uint64_t seed = 1; seed <= kJobs; ++seed) {
    shape.tied = seed % 3 == 0;
    const auto job = RandomJob(seed, shape);
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
    check(*job);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace oom::testing
