// The executor with fake operators: order, failures, draining, graphs in turn; and the simulator,
// which walks the same graph: closed forms, and equality with what the executor did.

#include "runtime/graph/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "planner/simulator.h"
#include "tests/graph/delay.h"
#include "tests/graph/engine_testing.h"
#include "tests/graph/order_runner.h"

namespace oom::testing {
namespace {

Executor::Options OptionsFor(int rank, std::function<void(const Status&)> on_failure = nullptr) {
  return {.rank = rank,
          .make_stream =
              [](Resource resource) {
                return MakeCpuStream(std::string(ResourceName(resource)), nullptr);
              },
          .on_node = nullptr,
          .on_failure = std::move(on_failure)};
}

// Random nodes on random device streams with random edges to earlier nodes or to any node of the
// step before.
StepGraph RandomGraph(uint64_t seed, int64_t node_count) {
  Random random(seed);
  StepGraph graph;
  for (int64_t i = 0; i < node_count; ++i) {
    Node node{.kind = NodeKind::kForwardMixer,
              .resource = static_cast<Resource>(random.Between(0, kResourceCount - 2))};
    if (random.Chance(0.1)) node.owner_rank = static_cast<int>(random.Between(0, 1));
    for (int64_t edge = random.Between(0, 3); edge > 0; --edge) {
      if (i > 0 && random.Chance(0.6))
        node.predecessors.push_back({.node = random.Between(0, i - 1)});
      if (random.Chance(0.3)) {
        node.predecessors.push_back({.node = random.Between(0, node_count - 1), .distance = 1});
      }
    }
    graph.nodes.push_back(std::move(node));
  }
  return graph;
}

// Goal: no node runs before its predecessors or out of its turn, whatever the delays.
TEST(Executor, RunsEveryNodeOnceAStepAfterItsPredecessors) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const StepGraph graph = RandomGraph(seed, 40);
    for (const int rank : {0, 1}) {
      OrderRunner runner({.graph = &graph, .rank = rank, .work = [seed](const Node&, int64_t) {
                            RandomDelay(seed, 100);
                          }});
      std::atomic<int64_t> done{0};
      std::atomic<bool> in_order{true};
      constexpr int64_t kSteps = 12;
      {
        Executor executor(OptionsFor(rank), &runner);
        const int handle = executor.AddGraph(&graph);
        for (int64_t step = 0; step < kSteps; ++step) {
          const Status issued = executor.Issue(
              handle, step, [&, step] { in_order = in_order && done.fetch_add(1) == step; });
          ASSERT_TRUE(issued.ok()) << issued.ToString();
          // At most two steps are in flight.
          ASSERT_GE(done.load(), step - 1);
        }
        const Status drained = executor.Drain();
        ASSERT_TRUE(drained.ok()) << "seed " << seed << ": " << drained.ToString();
        EXPECT_EQ(done.load(), kSteps);
      }
      EXPECT_TRUE(in_order.load());
      int64_t mine = 0;
      for (const Node& node : graph.nodes)
        mine += node.owner_rank < 0 || node.owner_rank == rank ? 1 : 0;
      EXPECT_EQ(runner.run_count(), mine * kSteps);
    }
  }
}

// Goal: a failure in any node ends the run with that failure, said once; nothing hangs, and steps
// that failed are not reported as done.
TEST(Executor, AFailureInAnyNodeEndsTheRunWithTheFirstFailure) {
  const StepGraph graph = RandomGraph(77, 25);
  for (size_t fail_at = 0; fail_at < graph.nodes.size(); ++fail_at) {
    if (graph.nodes[fail_at].owner_rank > 0) continue;
    for (const int64_t fail_step : {0, 2}) {
      OrderRunner runner({.graph = &graph,
                          .work = [](const Node&, int64_t) { RandomDelay(5, 50); },
                          .fail =
                              [&](const Node& node, int64_t step) {
                                const bool here =
                                    &node == &graph.nodes[fail_at] && step == fail_step;
                                return here ? Status(Code::kInternal, "planted") : Status::Ok();
                              }});
      std::atomic<int> failures{0};
      std::atomic<int64_t> done{0};
      Executor executor(OptionsFor(0,
                                   [&](const Status& status) {
                                     ++failures;
                                     EXPECT_EQ(status.message(), "planted");
                                   }),
                        &runner);
      const int handle = executor.AddGraph(&graph);
      Status issued;
      for (int64_t step = 0; step < 6 && issued.ok(); ++step) {
        issued = executor.Issue(handle, step, [&] { ++done; });
      }
      EXPECT_EQ(executor.Drain().message(), "planted");
      EXPECT_EQ(executor.Issue(handle, 9, nullptr).message(), "planted");
      EXPECT_EQ(failures.load(), 1);
      EXPECT_LE(done.load(), fail_step);
    }
  }
}

// Goal: a failure releases what waits for other processes' words, if the owner's on_failure does.
TEST(Executor, AFailureReleasesWaitersThroughOnFailure) {
  StepGraph graph;
  graph.nodes.push_back({.kind = NodeKind::kUpdate, .resource = Resource::kHostOptimizer});
  Node load{.kind = NodeKind::kLoadUnit, .resource = Resource::kHostToDevice};
  load.predecessors.push_back({.node = 0});
  graph.nodes.push_back(load);
  graph.nodes.push_back({.kind = NodeKind::kHead, .resource = Resource::kCompute});
  OrderRunner runner({.graph = &graph, .fail = [&](const Node& node, int64_t) {
                        return node.kind == NodeKind::kHead ? Status(Code::kInternal, "planted")
                                                            : Status::Ok();
                      }});
  // Nobody runs the host's node: only the release ends the load.
  Executor executor(OptionsFor(0, [&](const Status&) { runner.Abort(); }), &runner);
  const int handle = executor.AddGraph(&graph);
  ASSERT_TRUE(executor.Issue(handle, 0, nullptr).ok());
  EXPECT_EQ(executor.Drain().message(), "planted");
}

TEST(Executor, GraphsInTurnDrainBetweenAndKeepTheirOwnSteps) {
  const StepGraph first = RandomGraph(1, 20);
  const StepGraph second = RandomGraph(2, 15);
  // Runs nodes of either graph.
  class Both : public NodeRunner {
   public:
    Both(const StepGraph* first, OrderRunner* a, OrderRunner* b) : first_(first), a_(a), b_(b) {}
    Status Run(const Node& node, int64_t step) override {
      const Node* begin = first_->nodes.data();
      const bool of_first = &node >= begin && &node < begin + first_->nodes.size();
      const int id = of_first ? 0 : 1;
      if (running_[1 - id].load() != 0) return Status(Code::kDataLoss, "two graphs at once");
      ++running_[id];
      const Status status = of_first ? a_->Run(node, step) : b_->Run(node, step);
      --running_[id];
      return status;
    }

   private:
    const StepGraph* const first_;
    OrderRunner* const a_;
    OrderRunner* const b_;
    std::atomic<int> running_[2] = {0, 0};
  };
  const auto work = [](const Node&, int64_t) { RandomDelay(3, 50); };
  OrderRunner a({.graph = &first, .work = work});
  OrderRunner b({.graph = &second, .work = work});
  Both both(&first, &a, &b);
  Executor executor(OptionsFor(0), &both);
  const int first_handle = executor.AddGraph(&first);
  const int second_handle = executor.AddGraph(&second);
  int64_t first_step = 0, second_step = 0;
  Random random(9);
  for (int turn = 0; turn < 20; ++turn) {
    for (int64_t n = random.Between(1, 3); n > 0; --n) {
      ASSERT_TRUE(executor.Issue(first_handle, first_step++, nullptr).ok());
    }
    for (int64_t n = random.Between(1, 3); n > 0; --n) {
      ASSERT_TRUE(executor.Issue(second_handle, second_step++, nullptr).ok());
    }
  }
  const Status drained = executor.Drain();
  ASSERT_TRUE(drained.ok()) << drained.ToString();
}

// ---- the simulator ----

StepGraph Chain(const std::vector<Resource>& resources) {
  StepGraph graph;
  for (size_t i = 0; i < resources.size(); ++i) {
    Node node{.kind = NodeKind::kForwardMixer, .resource = resources[i]};
    if (i > 0) node.predecessors.push_back({.node = static_cast<int64_t>(i) - 1});
    graph.nodes.push_back(std::move(node));
  }
  return graph;
}

TEST(Simulator, AChainOnOneResourceTakesItsSum) {
  const StepGraph graph = Chain(std::vector<Resource>(5, Resource::kCompute));
  const Simulation simulation = Simulate(graph, [](const Node&) { return 2.0; });
  EXPECT_DOUBLE_EQ(simulation.single_step_seconds, 10.0);
  EXPECT_DOUBLE_EQ(simulation.step_seconds, 10.0);
  EXPECT_DOUBLE_EQ(simulation.serial_seconds, 10.0);
  EXPECT_DOUBLE_EQ(simulation.busy_seconds[0], 10.0);
  EXPECT_DOUBLE_EQ(simulation.compute_wait_seconds, 0.0);
}

// Loads ahead of compute: one load and all compute if compute is slower, else all loads and one
// compute; without a bound on windows the steady step is the slower resource.
TEST(Simulator, APipelineTakesItsSlowerResource) {
  for (const double load : {0.5, 1.0, 3.0}) {
    constexpr int kParts = 6;
    StepGraph graph;
    for (int i = 0; i < kParts; ++i) {
      graph.nodes.push_back({.kind = NodeKind::kLoadUnit, .resource = Resource::kHostToDevice});
      Node compute{.kind = NodeKind::kForwardMixer, .resource = Resource::kCompute};
      compute.predecessors.push_back({.node = 2 * i});
      graph.nodes.push_back(std::move(compute));
    }
    const Simulation simulation = Simulate(
        graph, [load](const Node& node) { return node.kind == NodeKind::kLoadUnit ? load : 1.0; });
    EXPECT_DOUBLE_EQ(simulation.single_step_seconds,
                     load <= 1.0 ? load + kParts : kParts * load + 1.0);
    EXPECT_DOUBLE_EQ(simulation.step_seconds, kParts * std::max(load, 1.0));
  }
}

// One window: each load waits for the compute that reads what is in it, so nothing overlaps.
TEST(Simulator, OneWindowLeavesNothingToOverlap) {
  StepGraph graph;
  constexpr int64_t kParts = 4;
  for (int64_t i = 0; i < kParts; ++i) {
    Node load{.kind = NodeKind::kLoadUnit, .resource = Resource::kHostToDevice};
    if (i > 0) load.predecessors.push_back({.node = 2 * i - 1});
    if (i == 0) load.predecessors.push_back({.node = 2 * kParts - 1, .distance = 1});
    graph.nodes.push_back(std::move(load));
    Node compute{.kind = NodeKind::kForwardMixer, .resource = Resource::kCompute};
    compute.predecessors.push_back({.node = 2 * i});
    graph.nodes.push_back(std::move(compute));
  }
  const Simulation simulation = Simulate(graph, [](const Node&) { return 1.5; });
  EXPECT_DOUBLE_EQ(simulation.step_seconds, 2 * kParts * 1.5);
  EXPECT_DOUBLE_EQ(simulation.compute_wait_seconds, kParts * 1.5);
}

// load -> compute -> store -> update -> load of the next step: the cycle is the step.
TEST(Simulator, AnEdgeToTheStepBeforeClosesTheCycle) {
  StepGraph graph = Chain({Resource::kHostToDevice, Resource::kCompute, Resource::kDeviceToHost,
                           Resource::kHostOptimizer});
  graph.nodes[0].predecessors.push_back({.node = 3, .distance = 1});
  const Simulation simulation =
      Simulate(graph, [](const Node& node) { return 1.0 + static_cast<double>(node.resource); });
  // Resources number 1, 0, 2 and 7.
  EXPECT_DOUBLE_EQ(simulation.step_seconds, 2.0 + 1.0 + 3.0 + 8.0);
}

TEST(Simulator, TheHostTakesWhatIsReadyFirst) {
  StepGraph graph;
  graph.nodes.push_back({.kind = NodeKind::kHead, .resource = Resource::kCompute});
  Node late{.kind = NodeKind::kUpdate, .resource = Resource::kHostOptimizer};
  late.predecessors.push_back({.node = 0});
  graph.nodes.push_back(late);
  graph.nodes.push_back({.kind = NodeKind::kUpdate, .resource = Resource::kHostOptimizer});
  const Simulation simulation = Simulate(
      graph, [](const Node&) { return 1.0; }, 1);
  EXPECT_DOUBLE_EQ(simulation.nodes[2].start_seconds, 0.0);
  EXPECT_DOUBLE_EQ(simulation.nodes[1].start_seconds, 1.0);
}

// Goal: what the simulator says of a plan's graph is what the executor does with it, node by node.
// Method: the runner keeps virtual time while the real executor, under random delays, decides what
// runs when; starts and ends within the last step must be the simulator's.
TEST(Simulator, EqualsTheExecutorNodeByNode) {
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    Random random(seed);
    TestJob job;
    job.model = RandomModel(random, {.max_layers = 4, .tiny = true});
    job.plan = PlainPlan(job.model, 1);
    ScrambleBitNeutral(random, {.max_numa_nodes = 1}, &job.plan);
    // Updates become ready in store order then, which is the order of HostLoop.
    job.plan.set_update_mode(v1::UPDATE_MODE_OVERLAPPED);
    for (v1::UnitPlan& unit : *job.plan.mutable_units()) unit.set_home(v1::STATE_HOME_STREAMED);
    job.Derive();
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job.plan.ShortDebugString());
    const auto seconds = [&](const Node& node) {
      const auto index = static_cast<uint64_t>(&node - job.graph.nodes.data());
      return static_cast<double>(1 + Mix(seed, index) % 1000);
    };
    constexpr int kSteps = 6;
    OrderRunner runner({.graph = &job.graph,
                        .seconds = seconds,
                        .work = [seed](const Node&, int64_t) { RandomDelay(seed, 50); }});
    SharedWord stop{};
    std::thread host([&] { OrderRunner::HostLoop({&runner}, kSteps, stop); });
    {
      Executor executor(OptionsFor(0,
                                   [&](const Status&) {
                                     stop.Publish(1);
                                     runner.Abort();
                                   }),
                        &runner);
      const int handle = executor.AddGraph(&job.graph);
      for (int64_t step = 0; step < kSteps; ++step) {
        ASSERT_TRUE(executor.Issue(handle, step, nullptr).ok());
      }
      const Status drained = executor.Drain();
      if (!drained.ok()) stop.Publish(1);
      host.join();
      ASSERT_TRUE(drained.ok()) << drained.ToString();
    }
    double begin = 1e300;
    for (size_t i = 0; i < job.graph.nodes.size(); ++i) {
      begin = std::min(begin, runner.virtual_start(static_cast<int64_t>(i), kSteps - 1));
    }
    // Times relative to the step's first node; from a stable period on they are the same for every
    // step.
    const Simulation simulation = Simulate(job.graph, seconds, kSteps);
    ASSERT_EQ(simulation.nodes.size(), job.graph.nodes.size());
    for (const SimulatedNode& node : simulation.nodes) {
      ASSERT_DOUBLE_EQ(node.start_seconds, runner.virtual_start(node.node, kSteps - 1) - begin)
          << NodeKindName(job.graph.nodes[static_cast<size_t>(node.node)].kind) << " " << node.node;
      ASSERT_DOUBLE_EQ(node.end_seconds, runner.virtual_end(node.node, kSteps - 1) - begin);
    }
  }
}

}  // namespace
}  // namespace oom::testing
