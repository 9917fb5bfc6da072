#include "server/oomd/job_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "runtime/base/units.h"

namespace oom {
namespace {

NodeResources::Options TwoNodes() {
  return {.capacity_bytes = {10_GiB, 10_GiB}, .device_counts = {{v1::DEVICE_KIND_CPU, 4}}};
}

ResourceNeed Need(int devices, int64_t node0, int64_t node1) {
  return {
      .device_kind = v1::DEVICE_KIND_CPU, .device_count = devices, .bytes_by_node = {node0, node1}};
}

// Goal: never more than fits; the order is priority, then submission; what is released can be taken
// again. Method: random submissions, starts and ends against a model that is a sorted list and
// plain sums.
TEST(JobQueueTest, StartsTheModelsHeadAndNeverMoreThanFits) {
  struct Job {
    std::string id;
    int priority;
    int64_t order;
    ResourceNeed need;
  };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    NodeResources resources(TwoNodes());
    JobQueue queue;
    std::vector<Job> waiting;
    std::vector<Job> running;
    for (int i = 0; i < 2000; ++i) {
      const int what = below(3);
      if (what == 0) {
        Job job{"j" + std::to_string(i), below(5) - 2, i,
                Need(1 + below(4), below(8) * 1_GiB, below(8) * 1_GiB)};
        queue.Add(
            {.id = job.id, .priority = job.priority, .submit_order = job.order, .need = job.need});
        waiting.push_back(job);
        std::stable_sort(waiting.begin(), waiting.end(),
                         [](const Job& a, const Job& b) { return a.priority > b.priority; });
      } else if (what == 1 && !running.empty()) {
        const int victim = below(static_cast<int>(running.size()));
        resources.Release(running[victim].id);
        running.erase(running.begin() + victim);
      } else if (!waiting.empty() && below(8) == 0) {
        const int victim = below(static_cast<int>(waiting.size()));
        queue.Remove(waiting[victim].id);
        waiting.erase(waiting.begin() + victim);
      }
      int devices = 0;
      int64_t bytes[2] = {0, 0};
      const auto sum = [&] {
        devices = 0;
        bytes[0] = bytes[1] = 0;
        for (const Job& job : running) {
          devices += job.need.device_count;
          bytes[0] += job.need.bytes_by_node[0];
          bytes[1] += job.need.bytes_by_node[1];
        }
      };
      sum();
      std::string expected;
      if (!waiting.empty()) {
        const ResourceNeed& need = waiting[0].need;
        const bool fits = devices + need.device_count <= 4 &&
                          bytes[0] + need.bytes_by_node[0] <= 10_GiB &&
                          bytes[1] + need.bytes_by_node[1] <= 10_GiB;
        if (fits) expected = waiting[0].id;
      }
      ASSERT_EQ(queue.NextToStart(resources), expected);
      if (!expected.empty()) {
        resources.Take(expected, waiting[0].need, resources.ChooseDevices(waiting[0].need));
        queue.Remove(expected);
        running.push_back(waiting[0]);
        waiting.erase(waiting.begin());
      }
      sum();
      ASSERT_EQ(resources.used_bytes(), (std::vector<int64_t>{bytes[0], bytes[1]}));
      ASSERT_LE(bytes[0], 10_GiB);
      ASSERT_LE(bytes[1], 10_GiB);
      const auto& holders = resources.devices(v1::DEVICE_KIND_CPU);
      ASSERT_EQ(std::count_if(holders.begin(), holders.end(),
                              [](const std::string& h) { return !h.empty(); }),
                devices);
      ASSERT_EQ(queue.size(), waiting.size());
    }
  }
}

TEST(JobQueueTest, AWaitingJobIsToldWhatBlocksItInNumbers) {
  NodeResources resources(TwoNodes());
  resources.Take("running", Need(1, 8_GiB, 0), {0});
  JobQueue queue;
  queue.Add({.id = "head", .priority = 0, .submit_order = 1, .need = Need(1, 3_GiB, 0)});
  queue.Add({.id = "second", .priority = 0, .submit_order = 2, .need = Need(1, 1_GiB, 0)});
  const auto waiting = queue.Explain(resources);
  ASSERT_EQ(waiting.size(), 2U);
  EXPECT_EQ(waiting[0].reason, "WAITING_RESOURCES");
  EXPECT_EQ(waiting[0].blocked_by,
            "host memory of numa 0: needs 3.00 GiB, 2.00 GiB of 10.0 GiB free");
  EXPECT_EQ(waiting[1].reason, "WAITING_PRIORITY");
  EXPECT_EQ(waiting[1].head, "head");
  EXPECT_EQ(waiting[1].jobs_ahead, 1);
  // Strict order: the second would fit, and waits.
  EXPECT_EQ(queue.NextToStart(resources), "");
}

TEST(JobQueueTest, AJobThatCanNeverStartHoldsUpNobody) {
  NodeResources resources(TwoNodes());
  JobQueue queue;
  queue.Add({.id = "giant", .priority = 9, .submit_order = 1, .need = Need(1, 11_GiB, 0)});
  queue.Add({.id = "small", .priority = 0, .submit_order = 2, .need = Need(1, 1_GiB, 0)});
  EXPECT_EQ(queue.NextToStart(resources), "small");
  EXPECT_EQ(queue.Explain(resources)[0].reason, "WAITING_RESOURCES");
}

TEST(NodeResourcesTest, AnAdoptedJobKeepsItsDevices) {
  NodeResources resources({.capacity_bytes = {10_GiB}, .device_counts = {{v1::DEVICE_KIND_CPU, 3}}});
  resources.Take("adopted", Need(2, 1_GiB, 0), {2, 0});
  EXPECT_EQ(resources.ChooseDevices(Need(1, 1_GiB, 0)), std::vector<int>{1});
  resources.Take("next", Need(1, 1_GiB, 0), {1});
  EXPECT_TRUE(resources.ChooseDevices(Need(1, 1_GiB, 0)).empty());
  resources.Release("adopted");
  EXPECT_EQ(resources.ChooseDevices(Need(2, 1_GiB, 0)), (std::vector<int>{0, 2}));
}

TEST(ResourceNeedTest, CountsPoolsAndOnCpuDevicesTheDevicesToo) {
  v1::Job job;
  job.mutable_spec()->mutable_devices()->set_kind(v1::DEVICE_KIND_CPU);
  job.mutable_spec()->mutable_devices()->set_count(2);
  job.mutable_plan()->add_rank_numa_node(0);
  job.mutable_plan()->add_rank_numa_node(1);
  const auto estimate = [&](const char* space, int64_t bytes) {
    v1::MemoryEstimate& item = *job.mutable_plan()->mutable_estimate()->add_memory();
    item.set_space(space);
    item.set_bytes(bytes);
  };
  estimate("numa 0", 3_GiB);
  estimate("numa 0", 1_GiB);
  estimate("device 0", 1_GiB);
  estimate("device 1", 2_GiB);
  internal::v1::Pool pool;
  pool.set_numa_node(0);
  pool.set_bytes(3_GiB);
  EXPECT_EQ(NeedOf(job, {pool}).bytes_by_node, (std::vector<int64_t>{5_GiB, 2_GiB}));
  job.mutable_spec()->mutable_devices()->set_kind(v1::DEVICE_KIND_CUDA);
  EXPECT_EQ(NeedOf(job, {pool}).bytes_by_node, (std::vector<int64_t>{4_GiB}));
}

}  // namespace
}  // namespace oom
