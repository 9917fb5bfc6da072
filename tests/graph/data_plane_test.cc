// The data plane between ranks and the host optimizer in one process, so that ThreadSanitizer sees
// every race (engine rules, section 5): real executors, pools, words and updates; only the
// operators are fake.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/graph/delay.h"
#include "tests/graph/engine_testing.h"
#include "tests/graph/fake_job.h"

namespace oom::testing {
namespace {

HostOptimizer::Options WithDelays(uint64_t seed) {
  HostOptimizer::Options host;
  host.before_update = [seed](int64_t, int64_t) { RandomDelay(seed, 300); };
  return host;
}

FakeWorker::Options DelayedWorker(uint64_t seed) {
  FakeWorker::Options worker;
  worker.before_node = [seed](const Node&, int64_t) {
    RandomDelay(seed, 200);
    return Status::Ok();
  };
  return worker;
}

struct RunResult {
  std::vector<double> norms;
  std::vector<double> losses;
};

// Runs steps [first, last) and advances the reference with the clip factors that came out.
void RunJob(const TestJob& job, const PoolMap& pools, uint64_t seed, int64_t first, int64_t last,
            double max_gradient_norm, ReferenceJob* reference, RunResult* result) {
  HostOptimizer::Options host = WithDelays(seed);
  host.max_gradient_norm = max_gradient_norm;
  FakeJob run(job, pools, seed, first, host, DelayedWorker(seed));
  run.StartWorkers(last);
  for (int64_t step = first; step < last; ++step) {
    auto outcome = run.optimizer().FinishStep(step);
    if (!outcome.ok()) {
      std::string why = outcome.status().ToString();
      for (int rank = 0; rank < job.plan.rank_count(); ++rank) {
        why += "; rank " + std::to_string(rank) + ": " + run.Join(rank).ToString();
      }
      FAIL() << why << "\n" << run.Words();
    }
    double loss = 0.0;
    for (int rank = 0; rank < job.plan.rank_count(); ++rank) {
      loss += ReferenceJob::Loss(seed, step, rank);
    }
    ASSERT_EQ(outcome->loss_sum, loss) << "step " << step;
    result->norms.push_back(outcome->gradient_norm);
    result->losses.push_back(outcome->loss_sum);
    reference->Step(outcome->clip);
  }
  for (int rank = 0; rank < job.plan.rank_count(); ++rank) {
    const Status status = run.Join(rank);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  run.optimizer().Stop();
}

std::string Describe(const TestJob& job) {
  return job.plan.ShortDebugString() + " hidden " + std::to_string(job.model.hidden_size) +
         " vocabulary " + std::to_string(job.model.vocabulary_size);
}

// Goal: whatever the plan and the timing, each update used the gradients of its step, which came
// from the weights of its step. Method: gradients depend on the weights that were read, so that one
// wrong read shows in every later weight; 10,000 steps over random jobs against a single-threaded
// reference, bit by bit.
class RandomJobs : public ::testing::TestWithParam<uint64_t> {};  // The first seed.
constexpr uint64_t kJobsAtOnce = 20;

TEST_P(RandomJobs, EveryUpdateUsesExactlyTheGradientsOfItsStep) {
  constexpr int64_t kSteps = 50;
  for (uint64_t seed = GetParam(); seed < GetParam() + kJobsAtOnce; ++seed) {
    // Mostly the smallest: ThreadSanitizer takes its time for each byte.
    const auto job = RandomJob(seed, {.max_layers = seed % 8 == 0 ? 3 : 1,
                                      .max_ranks = seed % 4 == 0   ? 3
                                                   : seed % 4 == 1 ? 2
                                                                   : 1,
                                      .tiny = true});
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + Describe(*job));
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    const bool deferred = job->plan.update_mode() == v1::UPDATE_MODE_DEFERRED;
    RunResult result;
    RunJob(*job, pools.map(), seed, 0, kSteps, deferred && seed % 2 == 0 ? 0.5 : 0.0, &reference,
           &result);
    if (::testing::Test::HasFatalFailure()) return;
    ASSERT_EQ(reference.CompareAll(pools.map()), "");
  }
}

INSTANTIATE_TEST_SUITE_P(DataPlane, RandomJobs, ::testing::Range(uint64_t{1}, uint64_t{201}, kJobsAtOnce));

// Goal: plans that differ in residency, delivery, boundaries, retention, chunks, backlog, buffers,
// threads and NUMA placement give the same losses, norms, weights and moments bit for bit (engine
// rules, section 12).
TEST(DataPlane, PlansDoNotChangeABit) {
  for (const int ranks : {1, 2}) {
    for (const bool float32 : {false, true}) {
      const uint64_t seed = 900 + static_cast<uint64_t>(ranks) * 2 + (float32 ? 1 : 0);
      Random random(seed);
      JobShape shape{.max_layers = 2, .tiny = true};
      const ModelDescription model = RandomModel(random, shape);
      RunResult first;
      for (int variant = 0; variant < 6; ++variant) {
        TestJob job;
        job.model = model;
        job.plan = PlainPlan(model, ranks);
        if (float32) job.plan.set_precision(v1::PRECISION_FLOAT32);
        if (variant > 0) ScrambleBitNeutral(random, shape, &job.plan);
        job.Derive();
        SCOPED_TRACE(Describe(job));
        const TestPools pools(*job.layout);
        ReferenceJob reference(job, seed);
        reference.Fill(pools.map());
        RunResult result;
        RunJob(job, pools.map(), seed, 0, 12, 0.0, &reference, &result);
        if (::testing::Test::HasFatalFailure()) return;
        ASSERT_EQ(reference.CompareAll(pools.map()), "");
        if (variant == 0) first = result;
        ASSERT_EQ(result.norms, first.norms);
        ASSERT_EQ(result.losses, first.losses);
      }
    }
  }
}

// Goal: the embedding's rows of a step stay until every chunk's update has read them, though the
// next step gathers from other chunks only. Method: hold back the update of the second chunk in
// step 0; step 1, whose tokens all lie in the first chunk, may run up to its own rows, and not
// store them.
TEST(DataPlane, EmbeddingRowsStayUntilEveryChunkHasReadThem) {
  TestJob job;
  job.model = {.hidden_size = 32,
               .vocabulary_size = 200,
               .expert_count = 2,
               .experts_per_token = 1,
               .expert_width = 16};
  job.model.layers.resize(1);
  job.model.layers[0].attention = {.query_head_count = 1,
                                   .kv_head_count = 1,
                                   .head_size = 16,
                                   .rotary = {.size = 16, .pair_count = 8}};
  job.plan = PlainPlan(job.model, 1);
  job.plan.set_chunk_bytes(8192);  // 128 rows.
  job.plan.set_micro_batch_tokens(4);
  job.plan.set_optimizer_threads(0, 2);
  job.Derive();
  const auto beyond_first = [](uint64_t seed, int64_t step) {
    const auto tokens = ReferenceJob::Tokens(seed, step, 0, 0, 4, 200);
    return std::count_if(tokens.begin(), tokens.end(), [](int64_t token) { return token >= 128; });
  };
  uint64_t seed = 1;
  while (beyond_first(seed, 0) == 0 || beyond_first(seed, 1) != 0) ++seed;
  const TestPools pools(*job.layout);
  ReferenceJob reference(job, seed);
  reference.Fill(pools.map());
  ControlPage* page = nullptr;
  WaitResult held = WaitResult::kReached;
  HostOptimizer::Options host;
  host.before_update = [&](int64_t chunk, int64_t step) {
    if (chunk != 1 || step != 0) return;
    held = page->landed(0, 1).WaitAtLeast(2, page->aborted(),
                                          {.timeout = std::chrono::milliseconds(300)});
  };
  FakeJob run(job, pools.map(), seed, 0, host, {});
  page = &run.page();
  run.StartWorkers(2);
  for (int64_t step = 0; step < 2; ++step) {
    const auto outcome = run.optimizer().FinishStep(step);
    ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
    reference.Step(outcome->clip);
  }
  const Status status = run.Join(0);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(held, WaitResult::kTimeout);
  EXPECT_EQ(reference.CompareAll(pools.map()), "");
}

// Goal: rows of the embedding outside the batch are updated in the backward, before the embedding's
// gradient is there (engine rules, section 8). Method: the backward of the embedding waits until
// all of their blocks are updated.
TEST(DataPlane, RowsOutsideTheBatchAreUpdatedBeforeTheEmbeddingsGradientComes) {
  TestJob job;
  job.model = {.hidden_size = 64,
               .vocabulary_size = 1000,
               .expert_count = 2,
               .experts_per_token = 1,
               .expert_width = 16};
  job.model.layers.resize(1);
  job.model.layers[0].attention = {.query_head_count = 1,
                                   .kv_head_count = 1,
                                   .head_size = 16,
                                   .rotary = {.size = 16, .pair_count = 8}};
  job.plan = PlainPlan(job.model, 2);
  job.plan.set_chunk_bytes(65536);
  job.plan.set_micro_batch_tokens(4);
  job.Derive();
  constexpr uint64_t kSeed = 3;
  constexpr int64_t kSteps = 3;
  const TestPools pools(*job.layout);
  ReferenceJob reference(job, kSeed);
  reference.Fill(pools.map());
  const int64_t blocks = job.layout->units()[0].elements / kBlockElements;
  // Per step: 64 rows a block, at most 8 tokens of both ranks.
  const auto early_bytes = [&](int64_t step) {
    std::set<int64_t> with_rows;
    for (int rank = 0; rank < 2; ++rank) {
      for (const int64_t token : ReferenceJob::Tokens(kSeed, step, rank, 0, 4, 1000)) {
        with_rows.insert(token / 64);
      }
    }
    return (blocks - static_cast<int64_t>(with_rows.size())) * kBlockElements *
           job.layout->update_traffic_bytes(0);
  };
  const int64_t step_bytes = blocks * kBlockElements * job.layout->update_traffic_bytes(0);
  FakeJob* job_run = nullptr;
  FakeWorker::Options worker;
  worker.before_node = [&](const Node& node, int64_t step) {
    if (node.kind != NodeKind::kEmbeddingBackward) return Status::Ok();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const ControlPage& page = job_run->page();
    while (job_run->optimizer().update_bytes(0) < step * step_bytes + early_bytes(step)) {
      if (std::chrono::steady_clock::now() > deadline) {
        return Status(Code::kDeadlineExceeded, "no early update");
      }
      // Not every piece of an update rings the bell.
      static_cast<void>(page.bell().WaitAtLeast(page.bell().Load() + 1, page.aborted(),
                                                {.timeout = std::chrono::milliseconds(1)}));
    }
    return Status::Ok();
  };
  FakeJob run(job, pools.map(), kSeed, 0, {}, worker);
  job_run = &run;
  run.StartWorkers(kSteps);
  for (int64_t step = 0; step < kSteps; ++step) {
    ASSERT_GT(early_bytes(step), 0);
    const auto outcome = run.optimizer().FinishStep(step);
    ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
    reference.Step(outcome->clip);
  }
  for (int rank = 0; rank < 2; ++rank) {
    const Status status = run.Join(rank);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(reference.CompareAll(pools.map()), "");
}

// A new attempt has a new page with zero words: it goes on as if nothing had happened, and takes no
// word of the old one.
TEST(DataPlane, StopAndResumeOnANewPageChangesNothing) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const auto job = RandomJob(seed + 500, {.max_layers = 2, .max_ranks = 2, .tiny = true});
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + Describe(*job));
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    RunResult result;
    for (const auto& [first, last] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {3, 4}, {4, 9}}) {
      RunJob(*job, pools.map(), seed, first, last, 0.0, &reference, &result);
      if (::testing::Test::HasFatalFailure()) return;
    }
    ASSERT_EQ(reference.CompareAll(pools.map()), "");
  }
}

// Transfers equal the graph's account exactly (engine rules, section 13), but for embedding rows,
// which travel once each.
TEST(DataPlane, TransfersEqualTheGraphsAccount) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const auto job = RandomJob(seed + 700, {.max_layers = 2, .max_ranks = 2, .tiny = true});
    SCOPED_TRACE(Describe(*job));
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    constexpr int64_t kSteps = 3;
    FakeJob run(*job, pools.map(), seed, 0, WithDelays(seed), DelayedWorker(seed));
    run.StartWorkers(kSteps);
    for (int64_t step = 0; step < kSteps; ++step) {
      const auto outcome = run.optimizer().FinishStep(step);
      ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
    }
    std::map<std::pair<Resource, int64_t>, int64_t> planned;  // By resource and unit.
    std::map<int64_t, int64_t> planned_updates;               // Of the host, by unit.
    for (const Node& node : job->graph.nodes) {
      if (node.resource == Resource::kHostOptimizer) {
        if (node.kind == NodeKind::kUpdate) planned_updates[node.unit] += node.bytes * kSteps;
      } else if (node.owner_rank < 0 && node.unit >= 0) {
        planned[{node.resource, node.unit}] += node.bytes * kSteps;
      }
    }
    const bool streamed_rows = !job->layout->resident(0);
    for (int rank = 0; rank < job->plan.rank_count(); ++rank) {
      ASSERT_TRUE(run.Join(rank).ok());
      int64_t row_bytes = 0;
      if (streamed_rows) {
        for (int64_t step = 0; step < kSteps; ++step) {
          std::set<int64_t> rows;
          for (int a = 0; a < job->plan.accumulation(); ++a) {
            const auto tokens = ReferenceJob::Tokens(
                seed, step, rank, a, job->batch.micro_batch_tokens(), job->model.vocabulary_size);
            rows.insert(tokens.begin(), tokens.end());
          }
          row_bytes += static_cast<int64_t>(rows.size()) * job->model.hidden_size *
                       job->layout->row_gradient_bytes();
        }
      }
      const TransferCounts& moved = run.worker(rank).transfers();
      for (const ParameterUnit& unit : job->layout->units()) {
        for (const Resource resource :
             {Resource::kHostToDevice, Resource::kDeviceToHost, Resource::kBoundaryOut,
              Resource::kBoundaryIn, Resource::kCollective}) {
          int64_t expected = planned[{resource, unit.index}];
          if (unit.index == 0 && resource == Resource::kDeviceToHost) expected += row_bytes;
          EXPECT_EQ(moved.bytes(resource, unit.index), expected)
              << ResourceName(resource) << " of " << unit.name;
        }
      }
    }
    for (const ParameterUnit& unit : job->layout->units()) {
      EXPECT_EQ(run.optimizer().update_bytes(unit.index), planned_updates[unit.index]) << unit.name;
    }
  }
}

}  // namespace
}  // namespace oom::testing
