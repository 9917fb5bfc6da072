// A plan that comes with the job: one that was saved is taken as it is, and one that does not fit
// the job is refused by field.

#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "planner/plan_job.h"
#include "runtime/base/units.h"
#include "tests/planner/planner_testing.h"

namespace oom::testing {
namespace {

std::string ToJson(const v1::Plan& plan) {
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  EXPECT_TRUE(google::protobuf::util::MessageToJsonString(plan, &json, options).ok());
  return json;
}

// Goal: a plan can be saved, read, edited and submitted again (architecture, idea 2).
TEST(PlanJob, ASavedPlanRoundTrips) {
  const JobDirectory directory;
  for (const int64_t budget : {int64_t{0}, 4_MiB}) {
    v1::JobSpec spec = directory.Spec();
    spec.mutable_devices()->set_count(2);
    spec.mutable_budgets()->set_gpu_memory_bytes(budget);
    const auto planned = PlanJob(spec, LargeNode());
    ASSERT_TRUE(planned.ok()) << planned.status().ToString();
    WriteText(directory / "plan.json", ToJson(planned->plan));
    spec.set_plan(directory / "plan.json");
    const auto again = PlanJob(spec, LargeNode());
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(again->plan.SerializeAsString(), planned->plan.SerializeAsString());
    ASSERT_EQ(again->pools.size(), planned->pools.size());
    for (size_t i = 0; i < again->pools.size(); ++i) {
      EXPECT_EQ(again->pools[i].SerializeAsString(), planned->pools[i].SerializeAsString());
    }
  }
}

TEST(PlanJob, AnEditedPlanThatDoesNotFitTheJobIsRefusedByField) {
  const JobDirectory directory;
  const auto planned = PlanJob(directory.Spec(), LargeNode());
  ASSERT_TRUE(planned.ok());
  using Plan = v1::Plan;
  const std::vector<std::pair<std::string, std::function<void(Plan*)>>> cases = {
      {"plan.rank_count", [](Plan* p) { p->set_rank_count(2); }},
      {"plan.precision", [](Plan* p) { p->set_precision(v1::PRECISION_FLOAT32); }},
      {"plan.accumulation", [](Plan* p) { p->set_accumulation(2); }},
      {"plan.micro_batch_tokens", [](Plan* p) { p->set_micro_batch_tokens(17); }},
      {"plan.version", [](Plan* p) { p->set_version(9); }},
      {"plan.units[2]", [](Plan* p) { p->mutable_units(2)->set_unit("experts"); }},
      {"plan.units", [](Plan* p) { p->clear_units(); }},
      {"plan.layers", [](Plan* p) { p->clear_layers(); }},
      {"plan.window_count", [](Plan* p) { p->set_window_count(0); }},
      {"plan.rank_numa_node", [](Plan* p) { p->set_rank_numa_node(0, 2); }},
      {"plan.optimizer_threads", [](Plan* p) { p->add_optimizer_threads(1); }},
      {"plan.optimizer_threads", [](Plan* p) { p->clear_optimizer_threads(); }},
  };
  for (const auto& [field, change] : cases) {
    Plan plan = planned->plan;
    change(&plan);
    WriteText(directory / "plan.json", ToJson(plan));
    v1::JobSpec spec = directory.Spec();
    spec.set_plan(directory / "plan.json");
    EXPECT_TRUE(Refused(PlanJob(spec, LargeNode()), Code::kInvalidArgument, "INVALID_INPUT", field))
        << field;
  }
  v1::JobSpec clipped = directory.Spec();
  WriteText(directory / "plan.json", ToJson(planned->plan));
  clipped.set_plan(directory / "plan.json");
  clipped.mutable_optimizer()->set_max_gradient_norm(1.0);
  EXPECT_TRUE(Refused(PlanJob(clipped, LargeNode()), Code::kInvalidArgument, "INVALID_INPUT",
                      "plan.update_mode"));
  WriteText(directory / "plan.json", "{\"version\": 1, \"windows\": 2}");
  const auto unknown = PlanJob(clipped, LargeNode());
  EXPECT_TRUE(Refused(unknown, Code::kInvalidArgument, "INVALID_INPUT", "plan"));
  EXPECT_NE(unknown.status().message().find("windows"), std::string::npos)
      << unknown.status().message();
}

}  // namespace
}  // namespace oom::testing
