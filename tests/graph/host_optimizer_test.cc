// What the host optimizer adds to the update itself: the norm and the clip factor of a step, and
// who updates what on which NUMA node.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "runtime/memory/numa.h"
#include "tests/graph/engine_testing.h"
#include "tests/graph/fake_job.h"

namespace oom::testing {
namespace {

// Goal: the norm is the canonical sum over all blocks, wherever they live, and the clip factor
// follows from it. Method: the page's block sums against sums over the reference's gradients are
// exact up to FP64 rounding; their sum in block order is exact.
TEST(Clipping, TheNormIsTheCanonicalSumAndTheClipFactorFollows) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    auto job = RandomJob(seed + 6000, {.max_layers = 2, .max_ranks = 2, .tiny = true});
    job->plan.set_update_mode(v1::UPDATE_MODE_DEFERRED);
    job->Derive();
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    HostOptimizer::Options host;
    host.max_gradient_norm = seed % 3 == 0 ? 1e6 : 1.5;
    FakeJob run(*job, pools.map(), seed, 0, host, {});
    run.StartWorkers(1);
    const auto outcome = run.optimizer().FinishStep(0);
    ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
    ASSERT_TRUE(run.Join(0).ok());
    double sum = 0.0;
    for (const double squares : run.page().norm_squares()) sum += squares;
    EXPECT_EQ(outcome->gradient_norm, std::sqrt(sum));
    const double clip = std::min(1.0, host.max_gradient_norm / (outcome->gradient_norm + 1e-6));
    EXPECT_EQ(outcome->clip, clip);
    EXPECT_EQ(run.page().clip_record(0).clip, clip);
    EXPECT_EQ(run.page().clip_record(0).gradient_norm, outcome->gradient_norm);
    EXPECT_GT(outcome->gradient_norm, 1.5);
    const double expected = reference.GradientNorm();
    EXPECT_NEAR(outcome->gradient_norm, expected, 1e-6 * expected);
  }
}

TEST(Clipping, IsRefusedWithOverlappedUpdates) {
  const auto job = RandomJob(1, {.max_ranks = 1, .tiny = true, .may_accumulate = false});
  const TestPools pools(*job->layout);
  auto page = ControlPage::Create(job->layout->control_page());
  ASSERT_TRUE(page.ok());
  const auto started = HostOptimizer::Start({.layout = job->layout.get(),
                                             .pools = &pools.map(),
                                             .page = page->get(),
                                             .update_mode = v1::UPDATE_MODE_OVERLAPPED,
                                             .max_gradient_norm = 1.0,
                                             .threads_by_node = {1, 1}});
  ASSERT_FALSE(started.ok());
  EXPECT_EQ(started.status().field(), "plan.update_mode");
}

// Goal: each chunk is updated only by threads that were bound to its NUMA node.
TEST(Numa, ChunksAreUpdatedByTheirOwnNodesThreads) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    auto job = RandomJob(seed + 7000, {.max_layers = 2, .max_ranks = 2, .tiny = true});
    job->plan.clear_optimizer_threads();
    job->plan.add_optimizer_threads(2);
    job->plan.add_optimizer_threads(1);
    for (int u = 0; u < job->plan.units_size(); ++u)
      job->plan.mutable_units(u)->set_numa_node(u % 2);
    job->Derive();
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    FakeNumaTopology topology = FakeNumaTopology::TwoNodes(int64_t{1} << 30);
    std::atomic<int> bound{0};
    std::atomic<int> wrong{0};
    std::atomic<int64_t> updated_blocks{0};
    HostOptimizer::Options host;
    host.bind_thread = [&](int node) {
      ASSERT_TRUE(topology.BindThread(node).ok());
      ++bound;
    };
    host.on_update = [&](int node, int64_t chunk, int64_t, double start, double end) {
      const int home = job->layout->chunks()[static_cast<size_t>(chunk)].numa_node;
      const int thread = topology.NodeOfThread(std::this_thread::get_id());
      wrong += node != home || thread != home || end < start ? 1 : 0;
      ++updated_blocks;
    };
    FakeJob run(*job, pools.map(), seed, 0, host, {});
    run.StartWorkers(3);
    for (int64_t step = 0; step < 3; ++step) {
      const auto outcome = run.optimizer().FinishStep(step);
      ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
      reference.Step(outcome->clip);
    }
    for (int rank = 0; rank < job->plan.rank_count(); ++rank) ASSERT_TRUE(run.Join(rank).ok());
    run.optimizer().Stop();
    EXPECT_EQ(bound.load(), 3);
    EXPECT_EQ(wrong.load(), 0);
    int64_t streamed = 0;
    for (const Chunk& chunk : job->layout->chunks()) streamed += chunk.owner_rank < 0 ? 1 : 0;
    EXPECT_GE(updated_blocks.load(), 3 * streamed);
    ASSERT_EQ(reference.CompareAll(pools.map()), "");
  }
}

TEST(Numa, AStreamedChunkOnANodeWithoutThreadsIsRefused) {
  Random random(3);
  TestJob job;
  job.model = RandomModel(random, {.tiny = true});
  job.plan = PlainPlan(job.model, 1);
  job.plan.add_optimizer_threads(1);
  job.plan.mutable_units(1)->set_numa_node(1);
  job.Derive();
  const TestPools pools(*job.layout);
  auto page = ControlPage::Create(job.layout->control_page());
  ASSERT_TRUE(page.ok());
  const auto started = HostOptimizer::Start({.layout = job.layout.get(),
                                             .pools = &pools.map(),
                                             .page = page->get(),
                                             .threads_by_node = {1}});
  ASSERT_FALSE(started.ok());
  EXPECT_EQ(started.status().field(), "plan.optimizer_threads");
}

}  // namespace
}  // namespace oom::testing
