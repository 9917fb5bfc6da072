// Published models by their geometries, without a dataset or weights: planned for the budgets that
// a job names, in parts where the whole does not fit.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "planner/plan_job.h"
#include "runtime/base/units.h"
#include "tests/planner/planner_testing.h"

namespace oom::testing {
namespace {

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

// Goal: where the plain plan does not fit, operators come in parts and buffers are given up until
// it does, and where it fits nothing of that happens.
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

}  // namespace
}  // namespace oom::testing
