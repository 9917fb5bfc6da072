// Random small jobs for the tests of the engine: a model, a plan, and what follows from them. And a
// model of the job host's pools in ordinary memory. Values; single-threaded.

#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/graph/graph_builder.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/description.h"

namespace oom::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // Uniform in [low, high].
  int64_t Between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool Chance(double probability) {
    return std::uniform_real_distribution<double>()(engine_) < probability;
  }
  uint64_t Bits() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

// A well-mixed hash of its arguments, for values that several threads have to agree on.
uint64_t Mix(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);

struct JobShape {
  int max_layers = 3;
  int max_ranks = 4;
  int max_numa_nodes = 2;
  bool tiny = false;  // Tensors of at most a block or two, hidden size a multiple of 16.
  bool may_accumulate = true;
  bool tied = false;  // The embedding is the head's too.
};

// Everything that the engine derives from a plan. Not movable: the graph inputs point into it.
struct TestJob {
  ModelDescription model;
  v1::Plan plan;
  BatchShape batch;
  std::unique_ptr<SharedLayout> layout;
  StepGraph graph;

  // Builds layout and graph from the rest. CHECKs that the plan is valid.
  void Derive();
};

ModelDescription RandomModel(Random& random, const JobShape& shape);
// Everything streamed, overlapped, two of each buffer, boundaries on the host.
v1::Plan PlainPlan(const ModelDescription& model, int rank_count);
// Changes every field of `plan` that may not change a bit (engine rules, section 12).
void ScrambleBitNeutral(Random& random, const JobShape& shape, v1::Plan* plan);
std::unique_ptr<TestJob> RandomJob(uint64_t seed, const JobShape& shape);

// The job's pools, zero-filled, page-aligned.
class TestPools {
 public:
  explicit TestPools(const SharedLayout& layout);
  const PoolMap& map() const { return map_; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  PoolMap map_;
};

}  // namespace oom::testing
