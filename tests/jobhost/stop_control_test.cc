#include "server/jobhost/stop_control.h"

#include <gtest/gtest.h>

#include <thread>

namespace oom {
namespace {

internal::v1::Stop Stop(v1::JobState state, bool checkpoint, double grace_seconds = 60.0) {
  internal::v1::Stop stop;
  stop.set_final_state(state);
  stop.set_checkpoint(checkpoint);
  stop.set_grace_seconds(grace_seconds);
  return stop;
}

TEST(StopControlTest, AStopWithACheckpointHasItsGraceAndOneWithoutHasNone) {
  StopControl control;
  EXPECT_FALSE(control.request().has_value());
  control.Stop(Stop(v1::JOB_STATE_SUSPENDED, true));
  EXPECT_FALSE(control.must_abort());
  EXPECT_EQ(control.request()->final_state, v1::JOB_STATE_SUSPENDED);
  control.Stop(Stop(v1::JOB_STATE_CANCELLED, false));
  EXPECT_TRUE(control.must_abort());
  EXPECT_EQ(control.request()->final_state, v1::JOB_STATE_CANCELLED);
}

TEST(StopControlTest, ALaterStopNeverSlowsAnEarlierOneDown) {
  StopControl control;
  control.Stop(Stop(v1::JOB_STATE_CANCELLED, false));
  control.Stop(Stop(v1::JOB_STATE_CANCELLED, true, 1000.0));
  EXPECT_TRUE(control.must_abort());
}

TEST(StopControlTest, AGraceThatIsOverMeansNowUnlessTheCheckpointIsDurable) {
  StopControl late;
  late.Stop(Stop(v1::JOB_STATE_CANCELLED, true, 1e-9));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!late.must_abort() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_TRUE(late.must_abort());
  late.CheckpointIsDurable();
  EXPECT_FALSE(late.must_abort());
}

TEST(StopControlTest, AWaiterIsWokenByAStopAndElseByItsTimeout) {
  StopControl control;
  EXPECT_FALSE(control.WaitForStop(std::chrono::duration<double>(0.001)));
  std::thread waiter([&] { EXPECT_TRUE(control.WaitForStop(std::chrono::duration<double>(1e5))); });
  control.Stop(Stop(v1::JOB_STATE_CANCELLED, true));
  waiter.join();
}

TEST(StopControlTest, CheckpointRequestsAreTakenOnce) {
  StopControl control;
  control.AddCheckpoint(3);
  control.AddCheckpoint(4);
  EXPECT_TRUE(control.has_checkpoints());
  EXPECT_EQ(control.TakeCheckpoints(), (std::vector<int64_t>{3, 4}));
  EXPECT_FALSE(control.has_checkpoints());
}

}  // namespace
}  // namespace oom
