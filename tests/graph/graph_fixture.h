// The random jobs whose graphs the tests of GraphTest look at, and what a node's kind says of it.
// Single-threaded.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "runtime/graph/graph_builder.h"
#include "tests/graph/engine_testing.h"

namespace oom::testing {

bool UsesWeights(NodeKind kind);

class GraphTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kJobs = 60;

  // Calls `check` for many random jobs, every third one's embedding tied; the failing one named.
  static void ForJobs(const std::function<void(const TestJob&)>& check, JobShape shape = {});
};

}  // namespace oom::testing
