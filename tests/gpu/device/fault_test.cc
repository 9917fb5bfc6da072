// Goal: when a GPU fails in the middle of work, one listener learns it, with the reason, and everything enqueued before
// and after comes to its end: nothing hangs, nothing aborts.
// Method: a kernel that traps, between two streams that wait for each other. The process has no GPU after it, so there is
// one test.

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/device/cuda_faults.h"
#include "runtime/device/cuda_stream.h"
#include "runtime/device/cuda_timeline.h"
#include "tests/gpu/device/trap.h"

namespace oom::testing {
namespace {

TEST(FaultTest, AFailedGpuIsToldOnceAndItsStreamsRunDry) {
  Mutex mutex;
  std::vector<Status> told;
  CudaFaults faults;
  faults.Listen([&](const Status& status) {
    MutexLock lock(mutex);
    told.push_back(status);
  });
  std::atomic<int> done = 0;
  {
    Event forward, back;
    CudaTimeline timeline(&faults);
    const auto one = MakeCudaStream("one", 0, &timeline, &faults, nullptr);
    const auto two = MakeCudaStream("two", 0, &timeline, &faults, nullptr);
    const auto count = [&done](double, double) { ++done; };
    one->Launch([] { Trap(CurrentCudaStream()); }, count);
    for (uint64_t ticket = 1; ticket <= 50; ++ticket) {
      one->Record(&forward, ticket);
      two->Wait(&forward, ticket);
      two->Launch([] { Trap(CurrentCudaStream()); }, count);
      two->Record(&back, ticket);
      one->Wait(&back, ticket);
      one->Launch([] { Trap(CurrentCudaStream()); }, count);
    }
  }
  EXPECT_EQ(done, 101);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].reason(), "GPU_FAULT") << told[0].ToString();
  EXPECT_NE(told[0].message().find("(cudaError"), std::string::npos) << told[0].ToString();
}

}  // namespace
}  // namespace oom::testing
