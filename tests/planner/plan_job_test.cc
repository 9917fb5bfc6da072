// From a job on disk to a plan: what is planned fits what was allowed, and what cannot be is
// refused with numbers.

#include "planner/plan_job.h"

#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "planner/default_plan.h"
#include "planner/job_settings.h"
#include "runtime/base/file.h"
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

int ResidentUnits(const v1::Plan& plan) {
  return static_cast<int>(std::count_if(
      plan.units().begin(), plan.units().end(),
      [](const v1::UnitPlan& unit) { return unit.home() == v1::STATE_HOME_RESIDENT; }));
}

::testing::AssertionResult Refused(const Result<PlannedJob>& result, Code code,
                                   const std::string& reason, const std::string& field) {
  if (result.ok()) return ::testing::AssertionFailure() << "it was planned";
  const Status& status = result.status();
  if (status.code() == code && status.reason() == reason && status.field() == field) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << status.ToString() << ", reason " << status.reason() << ", field " << status.field();
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

v1::JobSpec Geometry(const std::string& name) {
  v1::JobSpec spec;
  spec.mutable_model()->set_config(OOM_SOURCE_DIR "/geometries/" + name + "/config.json");
  spec.mutable_model()->set_initialize(v1::INITIALIZATION_RANDOM);
  spec.set_sequence_length(4096);
  spec.set_global_batch(16);
  spec.set_steps(1);
  return spec;
}

// Goal: whole published models are planned anywhere, with the size that they are published with.
TEST(PlanJob, AGeometryIsPlannedForItsBudgetsWhateverTheNodeHas) {
  const NodeLimits small{.pool_capacity_bytes = {1_GiB}, .cpu_count = 2, .gpu_memory_bytes = 1_GiB};
  const std::pair<const char*, int64_t> cases[] = {{"qwen3-30b-a3b", 30'532'122'624},
                                                   {"mixtral-8x7b", 46'702'792'704},
                                                   {"qwen3.6-35b-a3b", 34'660'610'688},
                                                   {"qwen3.5-122b-a10b", 122'111'526'912}};
  for (const auto& [name, parameters] : cases) {
    v1::JobSpec spec = Geometry(name);
    const auto everything = PlanJob(spec, small);
    ASSERT_TRUE(everything.ok()) << everything.status().ToString();
    EXPECT_EQ(everything->model.parameter_count(), parameters);
    // Weights, low bits and two moments.
    EXPECT_GT(everything->plan.estimate().host_bytes_peak(), 12 * parameters);
    EXPECT_GT(everything->plan.estimate().step_seconds_lower_bound(), 0.0);
    EXPECT_TRUE(PlanJob(spec, NodeLimits{}).ok());

    spec.mutable_devices()->set_kind(v1::DEVICE_KIND_CUDA);
    EXPECT_TRUE(Refused(PlanJob(spec, small), Code::kResourceExhausted, "OUT_OF_GPU_MEMORY",
                        "budgets.gpu_memory"));
    spec.mutable_budgets()->set_gpu_memory_bytes(80_GiB);
    const auto on_gpu = PlanJob(spec, small);
    ASSERT_TRUE(on_gpu.ok()) << on_gpu.status().ToString();
    EXPECT_LE(on_gpu->plan.estimate().device_bytes_peak(), 80_GiB);
    EXPECT_GT(ResidentUnits(on_gpu->plan), 0);
    spec.mutable_budgets()->add_host_memory_bytes(100_GiB);
    EXPECT_TRUE(Refused(PlanJob(spec, small), Code::kResourceExhausted, "OUT_OF_HOST_MEMORY",
                        "budgets.host_memory"));
  }
  EXPECT_TRUE(
      Refused(PlanJob(Geometry("none"), small), Code::kNotFound, "INVALID_INPUT", "model.config"));
}

// Goal: where the plain plan does not fit, operators come in parts and buffers are given up until it does, and where
// it fits nothing of that happens.
TEST(PlanJob, OperatorsComeInPartsWhereTheWholeDoesNotFit) {
  const auto plan = [](v1::JobSpec spec, int64_t sequences, int64_t length, int64_t gpu_bytes) {
    spec.mutable_devices()->set_kind(v1::DEVICE_KIND_CUDA);
    spec.set_sequence_length(length);
    spec.set_global_batch(sequences);
    spec.mutable_budgets()->set_gpu_memory_bytes(gpu_bytes);
    return PlanJob(spec, NodeLimits{.cpu_count = 16});
  };
  const auto roomy = plan(Geometry("qwen3-30b-a3b"), 8, 4096, 80_GiB);
  ASSERT_TRUE(roomy.ok()) << roomy.status().ToString();
  EXPECT_EQ(roomy->plan.partitions().attention_head_group_count(), 1);
  EXPECT_EQ(roomy->plan.partitions().mixture_chunk_tokens(), 32768);
  EXPECT_EQ(roomy->plan.gradient_buffer_count(), 2);

  // Two gradient buffers of Mixtral's experts alone take 10.5 GiB.
  const auto mixtral = plan(Geometry("mixtral-8x7b"), 8, 4096, 24_GiB);
  ASSERT_TRUE(mixtral.ok()) << mixtral.status().ToString();
  EXPECT_LE(mixtral->plan.estimate().device_bytes_peak(), 24_GiB);
  EXPECT_LT(mixtral->plan.partitions().mixture_chunk_tokens(), 32768);
  EXPECT_EQ(mixtral->plan.gradient_buffer_count(), 1);

  const auto long_context = plan(Geometry("qwen3.6-35b-a3b"), 1, 131072, 24_GiB);
  ASSERT_TRUE(long_context.ok()) << long_context.status().ToString();
  EXPECT_LE(long_context->plan.estimate().device_bytes_peak(), 24_GiB);
  const int64_t segment = long_context->plan.partitions().recurrent_segment_tokens();
  EXPECT_TRUE(segment > 0 && segment < 131072 && segment % 64 == 0) << segment;
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
