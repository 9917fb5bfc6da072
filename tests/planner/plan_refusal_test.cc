// Jobs that cannot be planned: what is missing, too large or not possible yet is refused, by field
// and with numbers.

#include <gtest/gtest.h>

#include <string>

#include "planner/plan_job.h"
#include "runtime/base/units.h"
#include "runtime/graph/graph_builder.h"
#include "runtime/model/hf_config.h"
#include "tests/planner/planner_testing.h"

namespace oom::testing {
namespace {

TEST(PlanJob, HostMemoryIsRefusedWithNumbers) {
  const JobDirectory directory;
  v1::JobSpec spec = directory.Spec();
  const NodeLimits small{.pool_capacity_bytes = {100000, 100000}, .cpu_count = 2};
  const auto no_room = PlanJob(spec, small);
  EXPECT_TRUE(
      Refused(no_room, Code::kResourceExhausted, "OUT_OF_HOST_MEMORY", "budgets.host_memory"));
  EXPECT_NE(no_room.status().message().find(FormatBytes(100000)), std::string::npos)
      << no_room.status().message();
  spec.mutable_budgets()->add_host_memory_bytes(1_MiB);
  const auto one_budget = PlanJob(spec, LargeNode());
  EXPECT_TRUE(
      Refused(one_budget, Code::kResourceExhausted, "OUT_OF_HOST_MEMORY", "budgets.host_memory"));
  EXPECT_NE(one_budget.status().message().find(FormatBytes(1_MiB)), std::string::npos);
  spec.mutable_budgets()->add_host_memory_bytes(int64_t{1} << 40);
  const auto by_node = PlanJob(spec, LargeNode());
  EXPECT_TRUE(
      Refused(by_node, Code::kResourceExhausted, "OUT_OF_HOST_MEMORY", "budgets.host_memory"));
  EXPECT_NE(by_node.status().message().find("numa 0"), std::string::npos)
      << by_node.status().message();
  spec.mutable_budgets()->add_host_memory_bytes(1);
  EXPECT_TRUE(Refused(PlanJob(spec, LargeNode()), Code::kInvalidArgument, "INVALID_INPUT",
                      "budgets.host_memory"));
}

TEST(PlanJob, ADiskThatIsTooSmallForTheCheckpointsIsRefused) {
  const JobDirectory directory;
  // About 260 billion parameters: 12 bytes each, 1,001 times.
  WriteText(directory / "config.json", ConfigText(4096, 40, 200, 128, 4096));
  v1::JobSpec spec = directory.Spec();
  spec.mutable_checkpoint()->set_keep(1000);
  NodeLimits limits = LargeNode();
  limits.pool_capacity_bytes = {int64_t{1} << 50, int64_t{1} << 50};
  const auto planned = PlanJob(spec, limits);
  EXPECT_TRUE(Refused(planned, Code::kResourceExhausted, "STORAGE_FULL", "output"));
  EXPECT_NE(planned.status().message().find("1001 checkpoints"), std::string::npos)
      << planned.status().message();
}

TEST(PlanJob, MissingFilesAreRefusedByField) {
  const JobDirectory directory;
  v1::JobSpec spec = directory.Spec();
  spec.mutable_model()->set_config(directory / "none.json");
  EXPECT_TRUE(
      Refused(PlanJob(spec, LargeNode()), Code::kNotFound, "INVALID_INPUT", "model.config"));
  spec = directory.Spec();
  spec.mutable_model()->clear_config();
  spec.mutable_model()->clear_initialize();
  spec.mutable_model()->set_path(directory / "nowhere");
  EXPECT_TRUE(Refused(PlanJob(spec, LargeNode()), Code::kNotFound, "INVALID_INPUT", "model.path"));
  spec = directory.Spec();
  spec.mutable_data()->set_train(directory / "no-data");
  EXPECT_TRUE(Refused(PlanJob(spec, LargeNode()), Code::kNotFound, "INVALID_INPUT", "data.train"));
  spec = directory.Spec();
  spec.set_sequence_length(5000);
  EXPECT_TRUE(
      Refused(PlanJob(spec, LargeNode()), Code::kInvalidArgument, "INVALID_INPUT", "data.train"));
  spec = directory.Spec();
  spec.set_plan(directory / "no-plan.json");
  EXPECT_TRUE(Refused(PlanJob(spec, LargeNode()), Code::kNotFound, "INVALID_INPUT", "plan"));
  spec = directory.Spec();
  spec.set_output(directory / "config.json");
  EXPECT_TRUE(
      Refused(PlanJob(spec, LargeNode()), Code::kInvalidArgument, "INVALID_INPUT", "output"));
}

TEST(PlanJob, WhatGpusCannotDoYetIsRefused) {
  const JobDirectory directory;
  v1::JobSpec spec = directory.Spec();
  auto planned = PlanJob(spec, LargeNode());
  ASSERT_TRUE(planned.ok());
  const auto model = ReadHfConfig(directory / "config.json");
  v1::Plan plan = planned->plan;
  plan.set_cuda_devices(true);
  EXPECT_TRUE(ValidatePlan(*model, plan).ok());
  if (plan.rank_count() == 1) {
    spec.mutable_devices()->set_count(2);
    plan = PlanJob(spec, LargeNode())->plan;
    plan.set_cuda_devices(true);
  }
  plan.mutable_units(0)->set_home(v1::STATE_HOME_RESIDENT);
  EXPECT_EQ(ValidatePlan(*model, plan).field(), "plan.units[0]");
}

}  // namespace
}  // namespace oom::testing
