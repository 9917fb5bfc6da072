// The step graph's hash, by which job host and workers see that they have the same plan, and the
// refusal of plans that cannot be run.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "runtime/graph/graph_builder.h"
#include "tests/graph/engine_testing.h"

namespace oom::testing {
namespace {

// Goal: job host and workers agree exactly when they have the same plan.
TEST(GraphHash, TheHashSeesEveryFieldThatMattersAndNothingElse) {
  Random random(11);
  ModelDescription model = RandomModel(random, {});
  const AttentionDescription attention = model.layer(0).attention;
  model.layers.assign(4, {.attention = attention});
  const auto hash = [&](const std::function<void(v1::Plan*)>& change) {
    TestJob job;
    job.model = model;
    job.plan = PlainPlan(model, 2);
    job.plan.add_optimizer_threads(1);
    job.plan.mutable_layers(1)->set_retain_mixer(true);
    job.plan.set_backlog_bytes(200000);
    change(&job.plan);
    job.Derive();
    return job.graph.Hash();
  };
  const uint64_t plain = hash([](v1::Plan*) {});
  EXPECT_EQ(plain, hash([](v1::Plan*) {}));
  EXPECT_EQ(plain, hash([](v1::Plan* plan) { plan->mutable_estimate()->set_step_seconds(3.0); }));
  EXPECT_EQ(plain, hash([](v1::Plan* plan) { plan->set_worker_threads(7); }));
  const std::map<std::string, std::function<void(v1::Plan*)>> changes = {
      {"home", [](v1::Plan* p) { p->mutable_units(3)->set_home(v1::STATE_HOME_RESIDENT); }},
      {"numa_node", [](v1::Plan* p) { p->mutable_units(3)->set_numa_node(1); }},
      {"boundary",
       [](v1::Plan* p) { p->mutable_layers(2)->set_boundary(v1::BOUNDARY_HOME_DEVICE); }},
      {"retain_mixer", [](v1::Plan* p) { p->mutable_layers(1)->set_retain_mixer(false); }},
      {"retain_mixture", [](v1::Plan* p) { p->mutable_layers(2)->set_retain_mixture(true); }},
      {"chunk_bytes", [](v1::Plan* p) { p->set_chunk_bytes(65536); }},
      {"backlog_bytes", [](v1::Plan* p) { p->set_backlog_bytes(400000); }},
      {"window_count", [](v1::Plan* p) { p->set_window_count(3); }},
      {"gradient_buffer_count", [](v1::Plan* p) { p->set_gradient_buffer_count(1); }},
      {"boundary_buffer_count", [](v1::Plan* p) { p->set_boundary_buffer_count(1); }},
      {"update_mode", [](v1::Plan* p) { p->set_update_mode(v1::UPDATE_MODE_DEFERRED); }},
      {"accumulation",
       [](v1::Plan* p) {
         p->set_update_mode(v1::UPDATE_MODE_DEFERRED);
         p->set_accumulation(2);
       }},
      {"micro_batch_tokens", [](v1::Plan* p) { p->set_micro_batch_tokens(16); }},
      {"precision", [](v1::Plan* p) { p->set_precision(v1::PRECISION_FLOAT32); }},
  };
  std::map<uint64_t, std::string> seen = {{plain, "nothing"}};
  for (const auto& [field, change] : changes) {
    const auto [other, is_new] = seen.emplace(hash(change), field);
    EXPECT_TRUE(is_new) << field << " looks like " << other->second;
  }
}

// Goal: every plan that cannot be run is refused by the field that is at fault.
TEST(ValidatePlan, PlansThatCannotRunAreRefusedByField) {
  Random random(5);
  const ModelDescription model = RandomModel(random, {});
  const auto field = [&](const std::function<void(v1::Plan*)>& change) {
    v1::Plan plan = PlainPlan(model, 1);
    change(&plan);
    const Status status = ValidatePlan(model, plan);
    return status.ok() ? "" : status.field();
  };
  EXPECT_EQ(field([](v1::Plan*) {}), "");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_version(2); }), "plan.version");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_path(v1::EXECUTION_PATH_EXPERT_PARALLEL); }),
            "plan.path");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_rank_count(0); }), "plan.rank_count");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_rank_count(65); }), "plan.rank_count");
  EXPECT_EQ(field([](v1::Plan* p) { p->clear_reduction(); }), "plan.reduction");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_reduction(v1::GRADIENT_REDUCTION_DEVICE_FLOAT32); }),
            "");
  EXPECT_EQ(field([](v1::Plan* p) {
              p->set_reduction(v1::GRADIENT_REDUCTION_DEVICE_BFLOAT16);
              p->set_precision(v1::PRECISION_FLOAT32);
            }),
            "plan.reduction");
  EXPECT_EQ(field([](v1::Plan* p) {
              p->set_reduction(v1::GRADIENT_REDUCTION_DEVICE_FLOAT32);
              p->set_update_mode(v1::UPDATE_MODE_DEFERRED);
              p->set_accumulation(2);
            }),
            "plan.reduction");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_chunk_bytes(0); }), "plan.chunk_bytes");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_backlog_bytes(-1); }), "plan.backlog_bytes");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_window_count(0); }), "plan.window_count");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_gradient_buffer_count(0); }),
            "plan.gradient_buffer_count");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_boundary_buffer_count(0); }),
            "plan.boundary_buffer_count");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_accumulation(0); }), "plan.accumulation");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_accumulation(2); }), "plan.update_mode");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_micro_batch_tokens(0); }), "plan.micro_batch_tokens");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_worker_threads(0); }), "plan.worker_threads");
  EXPECT_EQ(field([](v1::Plan* p) { p->clear_update_mode(); }), "plan.update_mode");
  EXPECT_EQ(field([](v1::Plan* p) { p->mutable_units()->RemoveLast(); }), "plan.units");
  EXPECT_EQ(field([](v1::Plan* p) { p->mutable_units(1)->set_unit("layers.9"); }), "plan.units[1]");
  EXPECT_EQ(field([](v1::Plan* p) { p->mutable_units(1)->clear_home(); }), "plan.units[1]");
  EXPECT_EQ(field([](v1::Plan* p) { p->mutable_units(1)->set_numa_node(1); }), "plan.units[1]");
  EXPECT_EQ(field([](v1::Plan* p) { p->mutable_units(1)->set_numa_node(-1); }), "plan.units[1]");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_optimizer_threads(0, 0); }), "plan.optimizer_threads");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_optimizer_threads(0, -1); }), "plan.optimizer_threads");
  EXPECT_EQ(field([](v1::Plan* p) { p->clear_optimizer_threads(); }), "plan.optimizer_threads");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_rank_numa_node(0, 3); }), "plan.rank_numa_node");
  EXPECT_EQ(field([](v1::Plan* p) { p->set_rank_numa_node(0, -1); }), "plan.rank_numa_node");
  EXPECT_EQ(field([](v1::Plan* p) { p->mutable_layers()->RemoveLast(); }), "plan.layers");
  EXPECT_EQ(
      field([](v1::Plan* p) { p->mutable_layers(0)->set_boundary(v1::BOUNDARY_HOME_REGENERATED); }),
      "plan.layers[0]");
}

}  // namespace
}  // namespace oom::testing
