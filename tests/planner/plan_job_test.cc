// From a job on disk to a plan: what is planned fits what was allowed, and its account adds up.

#include "planner/plan_job.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "planner/default_plan.h"
#include "planner/job_settings.h"
#include "runtime/base/units.h"
#include "runtime/graph/graph_builder.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/hf_config.h"
#include "tests/planner/planner_testing.h"

namespace oom::testing {
namespace {

int64_t ResidentBytes(const v1::Plan& plan) {
  int64_t bytes = 0;
  for (const v1::MemoryEstimate& item : plan.estimate().memory()) {
    if (item.item() == "resident state and its gradients") bytes += item.bytes();
  }
  return bytes;
}

TEST(PlanJob, TheDefaultPlanIsValidAndItsPoolsAreTheLayouts) {
  const JobDirectory directory;
  for (const int devices : {1, 2, 4}) {
    for (const double clip : {0.0, 1.0}) {
      v1::JobSpec spec = directory.Spec();
      spec.mutable_devices()->set_count(devices);
      spec.mutable_optimizer()->set_max_gradient_norm(clip);
      const auto planned = PlanJob(spec, LargeNode());
      ASSERT_TRUE(planned.ok()) << planned.status().ToString();
      const auto model = ReadHfConfig(directory / "config.json");
      ASSERT_TRUE(model.ok());
      const Status valid = ValidatePlan(*model, planned->plan);
      EXPECT_TRUE(valid.ok()) << valid.ToString();
      EXPECT_EQ(planned->plan.update_mode(),
                clip > 0 ? v1::UPDATE_MODE_DEFERRED : v1::UPDATE_MODE_OVERLAPPED);
      EXPECT_EQ(planned->plan.micro_batch_tokens(), 4 / devices * 16);
      const SharedLayout layout =
          SharedLayout::Build(*model, planned->plan, BatchShapeOf(planned->spec, planned->plan));
      ASSERT_EQ(planned->pools.size(), layout.pools().size());
      for (size_t i = 0; i < layout.pools().size(); ++i) {
        EXPECT_EQ(planned->pools[i].name(), layout.pools()[i].name);
        EXPECT_EQ(planned->pools[i].bytes(), layout.pools()[i].bytes);
        EXPECT_EQ(planned->pools[i].numa_node(), layout.pools()[i].numa_node);
      }
      EXPECT_EQ(planned->model.parameter_count(), ParameterCount(layout.units()));
      const v1::PlanEstimate& estimate = planned->plan.estimate();
      EXPECT_GT(estimate.step_seconds_lower_bound(), 0.0);
      EXPECT_GT(estimate.host_bytes_peak(), 0);
      EXPECT_EQ(estimate.checkpoint_disk_bytes(), 4 * 12 * ParameterCount(layout.units()));
      if (clip > 0) {
        EXPECT_GE(estimate.deferred_extra_bytes(), 0);
      }
      // Both NUMA nodes have something to do.
      int on_second = 0;
      for (const v1::UnitPlan& unit : planned->plan.units())
        on_second += unit.numa_node() == 1 ? 1 : 0;
      EXPECT_GT(on_second, 0);
    }
  }
}

// The items of a space add up to what is compared with its budget.
TEST(PlanJob, TheAccountAddsUp) {
  const JobDirectory directory;
  v1::JobSpec spec = directory.Spec();
  spec.mutable_devices()->set_count(2);
  const auto planned = PlanJob(spec, LargeNode());
  ASSERT_TRUE(planned.ok());
  int64_t host = 0, device0 = 0, everything = 0;
  for (const v1::MemoryEstimate& item : planned->plan.estimate().memory()) {
    EXPECT_GT(item.bytes(), 0) << item.item();
    everything += item.bytes();
    host += item.space().rfind("numa", 0) == 0 ? item.bytes() : 0;
    device0 += item.space() == "device 0" ? item.bytes() : 0;
  }
  EXPECT_EQ(planned->plan.estimate().device_bytes_peak(), device0);
  // CPU devices are host memory and count there too.
  EXPECT_EQ(planned->plan.estimate().host_bytes_peak(), everything);
  EXPECT_LT(host, everything);
}

// Goal: more device memory never makes less resident, and no budget is ever passed.
TEST(PlanJob, ResidencyGrowsWithTheBudgetAndStaysWithinIt) {
  const JobDirectory directory;
  for (const int devices : {1, 2}) {
    for (const double clip : {0.0, 1.0}) {
      v1::JobSpec spec = directory.Spec();
      spec.mutable_devices()->set_count(devices);
      spec.mutable_optimizer()->set_max_gradient_norm(clip);
      const auto streamed = PlanJob(spec, LargeNode());
      ASSERT_TRUE(streamed.ok());
      EXPECT_EQ(ResidentUnits(streamed->plan), 0);
      int last = 0;
      int64_t last_bytes = 0;
      int refused = 0;
      const int64_t needed = streamed->plan.estimate().device_bytes_peak();
      // One buffer instead of two each, and operators in parts, take a third of it at least.
      for (int64_t budget = needed / 5; budget < needed * 6; budget += needed / 5) {
        spec.mutable_budgets()->set_gpu_memory_bytes(budget);
        const auto planned = PlanJob(spec, LargeNode());
        if (budget < needed / 3) {
          EXPECT_TRUE(Refused(planned, Code::kResourceExhausted, "OUT_OF_GPU_MEMORY",
                              "budgets.gpu_memory"));
          if (!planned.ok()) {
            EXPECT_NE(planned.status().message().find(FormatBytes(budget)), std::string::npos)
                << planned.status().message();
          }
          ++refused;
          continue;
        }
        if (!planned.ok()) continue;
        EXPECT_LE(planned->plan.estimate().device_bytes_peak(), budget);
        // A plan that had to shrink fills what that left over.
        if (budget < needed) continue;
        // A large unit may take the place of several small ones.
        EXPECT_GE(ResidentBytes(planned->plan), last_bytes);
        last_bytes = ResidentBytes(planned->plan);
        last = ResidentUnits(planned->plan);
      }
      EXPECT_GT(refused, 0);
      EXPECT_EQ(last, streamed->plan.units_size()) << "six times the memory holds everything";
      EXPECT_EQ(streamed->plan.units(0).unit(), "embedding");
    }
  }
}

// The job's setting stands in place of the configuration's, and is for the Qwen families alone.
TEST(PlanJob, YarnOfTheJobIsTheModels) {
  const JobDirectory directory;
  v1::JobSpec spec = directory.Spec();
  v1::RopeScaling* scaling = spec.mutable_model()->mutable_rope_scaling();
  scaling->set_kind(v1::ROPE_SCALING_KIND_YARN);
  scaling->set_factor(2.0);
  EXPECT_EQ(ReadJobModel(spec)->yarn(), MakeYarn(2.0, 64));
  const auto planned = PlanJob(spec, LargeNode());
  ASSERT_TRUE(planned.ok()) << planned.status().ToString();
  EXPECT_EQ(planned->model.rope_scaling().kind(), v1::ROPE_SCALING_KIND_YARN);
  EXPECT_EQ(planned->model.rope_scaling().factor(), 2.0);
  EXPECT_EQ(planned->model.rope_scaling().original_max_position_embeddings(), 64);

  nlohmann::json config = nlohmann::json::parse(ConfigText(32, 4, 200, 6, 32));
  config["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 16}};
  WriteText(directory / "config.json", config.dump());
  EXPECT_EQ(ReadJobModel(spec)->yarn(), MakeYarn(2.0, 16));
  scaling->set_original_max_position_embeddings(32);
  EXPECT_EQ(ReadJobModel(spec)->yarn(), MakeYarn(2.0, 32));
  spec.mutable_model()->clear_rope_scaling();
  EXPECT_EQ(ReadJobModel(spec)->yarn(), MakeYarn(8.0, 16));
  EXPECT_EQ(PlanJob(spec, LargeNode())->model.rope_scaling().factor(), 8.0);

  config["architectures"] = {"MixtralForCausalLM"};
  config["model_type"] = "mixtral";
  config.erase("rope_scaling");
  config.erase("moe_intermediate_size");
  config.erase("norm_topk_prob");
  WriteText(directory / "config.json", config.dump());
  EXPECT_TRUE(PlanJob(spec, LargeNode()).ok());
  spec.mutable_model()->mutable_rope_scaling()->set_kind(v1::ROPE_SCALING_KIND_YARN);
  spec.mutable_model()->mutable_rope_scaling()->set_factor(2.0);
  const auto mixtral = PlanJob(spec, LargeNode());
  EXPECT_TRUE(Refused(mixtral, Code::kInvalidArgument, "INVALID_INPUT", "model.rope_scaling"));
  EXPECT_NE(mixtral.status().message().find("MixtralForCausalLM"), std::string::npos);
}

TEST(PlanJob, AGpusResidentStateIsNoPoolOfTheHosts) {
  const JobDirectory directory;
  v1::JobSpec spec = directory.Spec();
  spec.mutable_devices()->set_kind(v1::DEVICE_KIND_CUDA);
  NodeLimits limits = LargeNode();
  limits.gpu_memory_bytes = int64_t{80} << 30;
  const auto planned = PlanJob(spec, limits);
  ASSERT_TRUE(planned.ok()) << planned.status().ToString();
  EXPECT_TRUE(planned->plan.cuda_devices());
  // Without a budget the whole GPU is one, and this model fits.
  for (const v1::UnitPlan& unit : planned->plan.units()) {
    EXPECT_EQ(unit.home(), v1::STATE_HOME_RESIDENT) << unit.unit();
  }
  // What is left keeps activations.
  for (const v1::LayerPlan& layer : planned->plan.layers()) {
    EXPECT_TRUE(layer.retain_mixer() && layer.retain_mixture());
  }
  for (const internal::v1::Pool& pool : planned->pools) {
    EXPECT_FALSE(pool.name().starts_with("device.")) << pool.name();
  }
  int64_t host_bytes = 0, device_bytes = 0;
  for (const v1::MemoryEstimate& item : planned->plan.estimate().memory()) {
    (item.space().starts_with("device") ? device_bytes : host_bytes) += item.bytes();
  }
  EXPECT_EQ(planned->plan.estimate().device_bytes_peak(), device_bytes);
  EXPECT_EQ(planned->plan.estimate().host_bytes_peak(), host_bytes);

  limits.gpu_memory_bytes = int64_t{1} << 20;
  EXPECT_TRUE(Refused(PlanJob(spec, limits), Code::kResourceExhausted, "OUT_OF_GPU_MEMORY",
                      "budgets.gpu_memory"));
}

// Goal: GPUs get a large backlog where the host has the memory, and no job is refused for it.
TEST(PlanJob, TheBacklogOfGpusTakesWhatTheHostHasLeft) {
  const JobDirectory directory;
  v1::JobSpec spec = directory.Spec();
  spec.mutable_devices()->set_kind(v1::DEVICE_KIND_CUDA);
  spec.mutable_devices()->set_count(1);
  spec.mutable_optimizer()->set_max_gradient_norm(0.0);
  NodeLimits limits = LargeNode();
  const auto large = PlanJob(spec, limits);
  ASSERT_TRUE(large.ok()) << large.status().ToString();
  // A small model: a tenth of its state is less than the least.
  EXPECT_EQ(large->plan.backlog_bytes(), 1_GiB);
  const auto model = ReadHfConfig(directory / "config.json");
  ModelDescription wide = *model;
  wide.vocabulary_size = 4'000'000'000 / wide.hidden_size / 2;
  spec = large->spec;  // Normalised.
  const v1::Plan plan = MakeDefaultPlan(spec, wide, limits);
  EXPECT_GT(plan.backlog_bytes(), 3_GiB);
  spec.mutable_budgets()->add_host_memory_bytes(48_GiB + 256_MiB);
  const int64_t narrow = MakeDefaultPlan(spec, wide, limits).backlog_bytes();
  EXPECT_GE(narrow, 1_GiB);
  EXPECT_LT(narrow, plan.backlog_bytes());
}

// The resources of the bound are those of the graph, and the bound is the slowest of them.
TEST(PlanJob, TheLowerBoundIsTheSlowestResource) {
  const JobDirectory directory;
  const auto planned = PlanJob(directory.Spec(), LargeNode());
  ASSERT_TRUE(planned.ok());
  double slowest = 0.0;
  bool has_h2d = false;
  for (const v1::ResourceEstimate& resource : planned->plan.estimate().resources()) {
    EXPECT_GT(resource.seconds(), 0.0) << resource.resource();
    slowest = std::max(slowest, resource.seconds());
    has_h2d = has_h2d || resource.resource().rfind("H2D", 0) == 0;
  }
  EXPECT_TRUE(has_h2d);
  EXPECT_EQ(planned->plan.estimate().step_seconds_lower_bound(), slowest);
}

}  // namespace
}  // namespace oom::testing
