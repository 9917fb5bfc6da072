// What happens when a step goes wrong: aborting (engine rules, section 7), and losses and gradients
// that are not finite.

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/graph/delay.h"
#include "tests/graph/engine_testing.h"
#include "tests/graph/fake_job.h"

namespace oom::testing {
namespace {

// Every chunk is whole: bit for bit the state of the version that its word says, but for rows of the embedding that
// the step updated early.
std::string BrokenChunk(const TestJob& job, const PoolMap& pools, const ReferenceJob& reference,
                        ControlPage& page) {
  for (const Chunk& chunk : job.layout->chunks()) {
    const auto version = static_cast<int64_t>(page.version(chunk.index).Load());
    if (version > reference.step()) return "a version beyond the last step";
    const std::string difference = reference.Compare(pools, chunk.index, version, /*within_a_step=*/true);
    if (!difference.empty()) return difference;
  }
  return "";
}

// Goal: an abort at any point ends every wait, leaves every chunk whole, and nothing that lands
// afterwards is applied. Method: abort after the n-th node of a run of four steps, by a node that
// fails or from outside, for 200 n; then all gradient words are released, as by streams that an
// abort lets through, before the optimizer threads are stopped.
TEST(Abort, AtAnyPointChunksAreWholeAndNothingLaterIsApplied) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const auto job = RandomJob(seed + 3000, {.max_layers = 2, .max_ranks = 3, .tiny = true});
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    constexpr int64_t kSteps = 4;
    for (int64_t step = 0; step < kSteps; ++step) reference.Step(1.0);

    int64_t nodes_here = 0;
    for (const Node& node : job->graph.nodes) {
      nodes_here += node.resource == Resource::kHostOptimizer ? 0 : 1;
    }
    Random random(seed);
    const int64_t abort_at =
        random.Between(1, nodes_here * kSteps * job->plan.rank_count() * 9 / 10);
    const bool by_failure = random.Chance(0.5);
    std::atomic<int64_t> count{0};
    SharedWord reached{};
    FakeWorker::Options worker;
    worker.before_node = [&](const Node&, int64_t) {
      RandomDelay(seed, 200);
      if (count.fetch_add(1) + 1 != abort_at) return Status::Ok();
      if (by_failure) return Status(Code::kInternal, "planted");
      reached.Publish(1);
      return Status::Ok();
    };
    FakeJob run(*job, pools.map(), seed, 0, {}, worker);
    std::thread watchdog([&] {
      // Owners run some nodes alone, so that late points are never reached; the job then ends by
      // itself.
      while (reached.WaitAtLeast(1, run.page().aborted(),
                                 {.timeout = std::chrono::milliseconds(20)}) ==
             WaitResult::kTimeout) {
        if (run.page().updates_done().Load() >= kSteps) return;
      }
      run.page().Abort();
      for (const Chunk& chunk : job->layout->chunks()) {
        for (int rank = 0; rank < job->plan.rank_count(); ++rank) {
          run.page().landed(rank, chunk.index).RaiseTo(kSteps + 10);
        }
      }
      run.page().bell().Ring();
    });
    run.StartWorkers(kSteps);
    Status host;
    for (int64_t step = 0; step < kSteps && host.ok(); ++step) {
      const auto outcome = run.optimizer().FinishStep(step);
      host = outcome.ok() ? Status::Ok() : outcome.status();
    }
    watchdog.join();
    run.optimizer().Stop();
    int planted = 0;
    for (int rank = 0; rank < job->plan.rank_count(); ++rank) {
      const Status status = run.Join(rank);
      if (status.ok()) continue;
      planted += status.code() == Code::kInternal ? 1 : 0;
      EXPECT_TRUE(status.code() == Code::kInternal || status.code() == Code::kAborted)
          << status.ToString();
    }
    const bool reached_it = count.load() >= abort_at;
    // The last nodes of the last step may come after the last update.
    EXPECT_TRUE(host.ok() || host.code() == Code::kAborted) << host.ToString();
    EXPECT_EQ(planted, reached_it && by_failure ? 1 : 0);
    ASSERT_EQ(BrokenChunk(*job, pools.map(), reference, run.page()), "");
  }
}

// Goal: no rank waits for router counts that never come. Method: in step 2 one of two ranks fails,
// or stands still, before it has published its own, once the other has and so waits for them.
TEST(Abort, EndsTheWaitForAnotherRanksRouterCounts) {
  for (const bool by_failure : {true, false}) {
    Random random(12);
    TestJob job;
    job.model = RandomModel(random, {.max_layers = 2, .tiny = true});
    job.plan = PlainPlan(job.model, 2);
    job.Derive();
    const TestPools pools(*job.layout);
    ReferenceJob reference(job, 12);
    reference.Fill(pools.map());
    ControlPage* page = nullptr;
    SharedWord stands_still{};
    std::atomic<int> heads{0};
    FakeWorker::Options worker;
    worker.before_node = [&](const Node& node, int64_t step) {
      if (node.kind != NodeKind::kHead || step != 2 || heads++ > 0) return Status::Ok();
      while (page->router_counted(0).Load() < 3 && page->router_counted(1).Load() < 3) {
        std::this_thread::yield();
      }
      if (by_failure) return Status(Code::kInternal, "planted");
      stands_still.Publish(1);
      SharedWord never{};
      EXPECT_EQ(never.WaitAtLeast(1, page->aborted()), WaitResult::kAborted);
      return Status(Code::kAborted, "stood still");
    };
    FakeJob run(job, pools.map(), 12, 0, {}, worker);
    page = &run.page();
    run.StartWorkers(4);
    for (int64_t step = 0; step < 2; ++step) ASSERT_TRUE(run.optimizer().FinishStep(step).ok());
    if (!by_failure) {
      EXPECT_EQ(stands_still.WaitAtLeast(1, page->aborted()), WaitResult::kReached);
      run.Abort();
    }
    std::multiset<Code> codes;
    for (int rank = 0; rank < 2; ++rank) codes.insert(run.Join(rank).code());
    EXPECT_EQ(codes,
              (std::multiset<Code>{by_failure ? Code::kInternal : Code::kAborted, Code::kAborted}));
    EXPECT_EQ(page->router_counted(0).Load() + page->router_counted(1).Load(), 2u + 3u);
  }
}

// Runs one job with a fault in step `bad_step`; returns what FinishStep said of that step.
struct Fault {
  std::function<double(int64_t step, double loss)> loss;
  std::function<void(int64_t unit, int64_t step, float* gradient)> spoil;
};

Status RunWithFault(const TestJob& job, const TestPools& pools, uint64_t seed, int64_t bad_step,
                    const Fault& fault, ReferenceJob* reference, std::vector<int64_t>* versions,
                    Status* worker_status) {
  FakeWorker::Options worker;
  worker.loss = fault.loss;
  worker.spoil = fault.spoil;
  FakeJob run(job, pools.map(), seed, 0, {}, worker);
  run.StartWorkers(bad_step + 2);
  Status status;
  for (int64_t step = 0; step <= bad_step && status.ok(); ++step) {
    const auto outcome = run.optimizer().FinishStep(step);
    if (outcome.ok()) {
      reference->Step(outcome->clip);
    } else {
      status = outcome.status();
    }
  }
  run.Abort();
  for (int rank = 0; rank < job.plan.rank_count(); ++rank) {
    const Status of_rank = run.Join(rank);
    if (!of_rank.ok() && of_rank.code() != Code::kAborted) *worker_status = of_rank;
  }
  versions->clear();
  for (const Chunk& chunk : job.layout->chunks()) {
    versions->push_back(static_cast<int64_t>(run.page().version(chunk.index).Load()));
  }
  return status;
}

// Goal: nothing of a step is applied before every rank's loss is known and finite.
TEST(NonFinite, ALossThatIsNotFiniteAppliesNothingOfItsStep) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const auto job = RandomJob(seed + 4000, {.max_layers = 2, .max_ranks = 3, .tiny = true});
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    const double bad = seed % 2 == 0 ? std::numeric_limits<double>::quiet_NaN()
                                     : std::numeric_limits<double>::infinity();
    std::vector<int64_t> versions;
    Status of_worker;
    const Status status =
        RunWithFault(*job, pools, seed, 2,
                     {.loss = [bad](int64_t step, double loss) { return step == 2 ? bad : loss; }},
                     &reference, &versions, &of_worker);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition) << status.ToString();
    EXPECT_EQ(status.reason(), "NON_FINITE_LOSS");
    EXPECT_TRUE(of_worker.ok()) << of_worker.ToString();
    for (const Chunk& chunk : job->layout->chunks()) {
      ASSERT_EQ(versions[static_cast<size_t>(chunk.index)], 2);
      ASSERT_EQ(reference.Compare(pools.map(), chunk.index, 2), "");
    }
  }
}

// Goal: of a chunk whose gradient is not finite nothing is applied, and with deferred updates
// nothing of any chunk.
TEST(NonFinite, AGradientThatIsNotFiniteIsNeverApplied) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const auto job = RandomJob(seed + 5000, {.max_layers = 2, .max_ranks = 3, .tiny = true});
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
    const TestPools pools(*job->layout);
    ReferenceJob reference(*job, seed);
    reference.Fill(pools.map());
    const auto units = static_cast<int64_t>(job->layout->units().size());
    const auto unit = 1 + static_cast<int64_t>(seed) % (units - 1);
    const ParameterUnit& description = job->layout->units()[static_cast<size_t>(unit)];
    const int64_t element =
        static_cast<int64_t>(Mix(seed) % static_cast<uint64_t>(description.elements));
    std::vector<int64_t> versions;
    Status of_worker;
    const Status status = RunWithFault(*job, pools, seed, 2,
                                       {.spoil =
                                            [&](int64_t spoiled, int64_t step, float* gradient) {
                                              if (spoiled == unit && step == 2) {
                                                gradient[element] =
                                                    std::numeric_limits<float>::quiet_NaN();
                                              }
                                            }},
                                       &reference, &versions, &of_worker);
    // The owner of a resident chunk is the one to see it.
    const Status& verdict = job->layout->resident(unit) ? of_worker : status;
    EXPECT_EQ(verdict.code(), Code::kFailedPrecondition) << verdict.ToString();
    EXPECT_EQ(verdict.reason(), "NON_FINITE_GRADIENT");
    EXPECT_NE(verdict.message().find(description.name), std::string::npos) << verdict.ToString();
    for (const Chunk& chunk : job->layout->chunks()) {
      const bool bad = chunk.unit == unit && element >= chunk.first_element &&
                       element < chunk.first_element + chunk.elements;
      const bool deferred = job->plan.update_mode() == v1::UPDATE_MODE_DEFERRED;
      if (!bad && !deferred) continue;
      ASSERT_EQ(versions[static_cast<size_t>(chunk.index)], 2) << "chunk " << chunk.index;
      ASSERT_EQ(reference.Compare(pools.map(), chunk.index, 2), "");
    }
  }
}

// Goal: while one rank's loss is not known, no chunk is updated, however many gradients have
// landed.
TEST(NonFinite, NothingIsAppliedWhileALossIsUnknown) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Random random(seed);
    TestJob job;
    job.model = RandomModel(random, {.max_layers = 2, .tiny = true});
    job.plan = PlainPlan(job.model, 2);
    job.Derive();
    const TestPools pools(*job.layout);
    ReferenceJob reference(job, seed);
    reference.Fill(pools.map());
    const int64_t head = static_cast<int64_t>(job.layout->units().size()) - 1;
    ControlPage* page = nullptr;
    std::atomic<int> early{0};
    FakeWorker::Options worker;
    std::mutex mutex;
    int calls = 0;
    worker.loss = [&](int64_t step, double loss) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (++calls % 2 != 1) return loss;
      }
      // The first of the two waits until the other rank's head gradient has landed somewhere.
      const int64_t chunk = job.layout->first_chunk(head);
      const auto landed = static_cast<uint64_t>(step + 1);
      while (page->landed(0, chunk).Load() < landed && page->landed(1, chunk).Load() < landed) {
        std::this_thread::yield();
      }
      for (const Chunk& any : job.layout->chunks()) {
        early += page->version(any.index).Load() >= landed ? 1 : 0;
      }
      return loss;
    };
    FakeJob run(job, pools.map(), seed, 0, {}, worker);
    page = &run.page();
    run.StartWorkers(3);
    for (int64_t step = 0; step < 3; ++step) {
      ASSERT_TRUE(run.optimizer().FinishStep(step).ok());
      reference.Step(1.0);
    }
    for (int rank = 0; rank < 2; ++rank) ASSERT_TRUE(run.Join(rank).ok());
    EXPECT_EQ(early.load(), 0);
    ASSERT_EQ(reference.CompareAll(pools.map()), "");
  }
}

}  // namespace
}  // namespace oom::testing
