// Goal: a plan takes of a GPU what others leave it, and never counts our own jobs as others.

#include "server/oomd/gpu_limits.h"

#include <gtest/gtest.h>

#include "runtime/base/units.h"

namespace oom {
namespace {

Gpu MakeGpu(int64_t total_bytes, int64_t used_bytes) {
  Gpu gpu;
  gpu.memory_bytes = total_bytes;
  gpu.free_bytes = total_bytes - used_bytes;
  return gpu;
}

NodeLimits LimitsOf(const std::vector<Gpu>& gpus, const std::vector<std::string>& holders) {
  NodeLimits limits;
  LimitGpuMemory(gpus, holders, &limits);
  return limits;
}

TEST(GpuLimitsTest, AnIdleGpuIsTakenWhole) {
  // The driver keeps something for itself.
  const NodeLimits limits = LimitsOf({MakeGpu(80_GiB, 600_MiB)}, {""});
  EXPECT_EQ(limits.gpu_memory_bytes, 80_GiB);
  EXPECT_EQ(limits.gpu_memory_note, "");
}

TEST(GpuLimitsTest, WhatOthersHoldIsTheirs) {
  const NodeLimits limits = LimitsOf({MakeGpu(80_GiB, 0), MakeGpu(80_GiB, 30_GiB)}, {"", ""});
  EXPECT_EQ(limits.gpu_memory_bytes, 50_GiB);
  EXPECT_NE(limits.gpu_memory_note.find("30.0 GiB of GPU 1's 80.0 GiB"), std::string::npos)
      << limits.gpu_memory_note;
}

TEST(GpuLimitsTest, WhatAJobHoldsIsFreeForTheNextOne) {
  const NodeLimits limits = LimitsOf({MakeGpu(80_GiB, 79_GiB)}, {"a job"});
  EXPECT_EQ(limits.gpu_memory_bytes, 80_GiB);
  EXPECT_EQ(limits.gpu_memory_note, "");
}

TEST(GpuLimitsTest, TheSmallestGpuCounts) {
  EXPECT_EQ(LimitsOf({MakeGpu(80_GiB, 0), MakeGpu(24_GiB, 0)}, {"", ""}).gpu_memory_bytes, 24_GiB);
  EXPECT_NE(LimitsOf({MakeGpu(80_GiB, 70_GiB), MakeGpu(24_GiB, 0)}, {"", ""}).gpu_memory_note, "");
  EXPECT_EQ(LimitsOf({}, {}).gpu_memory_bytes, 0);
  // A GPU that others have filled has no unknown size, which 0 would be.
  EXPECT_EQ(LimitsOf({MakeGpu(80_GiB, 80_GiB), MakeGpu(24_GiB, 0)}, {"", ""}).gpu_memory_bytes, 1);
}

}  // namespace
}  // namespace oom
