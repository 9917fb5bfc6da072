#include "tests/graph/engine_testing.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/base/check.h"

namespace oom::testing {

uint64_t Mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t hash = 0x9E3779B97F4A7C15ULL;
  for (const uint64_t value : {a, b, c, d}) {
    hash = (hash ^ value) * 0xBF58476D1CE4E5B9ULL;
    hash ^= hash >> 29;
    hash *= 0x94D049BB133111EBULL;
    hash ^= hash >> 32;
  }
  return hash;
}

ModelDescription RandomModel(Random& random, const JobShape& shape) {
  ModelDescription model;
  model.hidden_size = shape.tiny ? (random.Chance(0.2) ? 32 : 16) : 16 * random.Between(1, 12);
  const int64_t layer_count = random.Between(1, shape.max_layers);
  model.tied_embedding = shape.tied;
  model.vocabulary_size = shape.tiny ? random.Between(40, 200) : random.Between(20, 900);
  AttentionDescription attention;
  attention.head_size = 16;
  attention.kv_head_count = random.Between(1, 2);
  attention.query_head_count = attention.kv_head_count * random.Between(1, 2);
  attention.rotary = {.size = 16, .pair_count = 8};
  model.expert_count = random.Between(2, shape.tiny ? 4 : 12);
  model.experts_per_token = random.Between(1, 2);
  model.expert_width = 16 * random.Between(1, shape.tiny ? 2 : 6);
  model.dense_width = 32 * random.Between(1, shape.tiny ? 2 : 6);
  attention.query_key_norm = random.Chance(shape.tiny ? 0.2 : 0.5);
  for (int64_t layer = 0; layer < layer_count; ++layer) {
    model.layers.push_back(
        {.attention = attention,
         .mixture = random.Chance(0.3) ? MixtureKind::kDense : MixtureKind::kRoutedExperts});
  }
  return model;
}

v1::Plan PlainPlan(const ModelDescription& model, int rank_count) {
  v1::Plan plan;
  plan.set_version(1);
  plan.set_path(v1::EXECUTION_PATH_LOCAL);
  plan.set_rank_count(rank_count);
  plan.set_precision(v1::PRECISION_BFLOAT16);
  for (const ParameterUnit& unit : BuildUnits(model, rank_count)) {
    v1::UnitPlan* unit_plan = plan.add_units();
    unit_plan->set_unit(unit.name);
    unit_plan->set_home(v1::STATE_HOME_STREAMED);
    unit_plan->set_delivery(v1::PARAMETER_DELIVERY_FULL);
  }
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) {
    plan.add_layers()->set_boundary(v1::BOUNDARY_HOME_HOST);
  }
  plan.mutable_partitions()->set_attention_head_group_count(1);
  plan.set_chunk_bytes(32768);
  plan.set_backlog_bytes(1 << 20);
  plan.set_window_count(2);
  plan.set_gradient_buffer_count(2);
  plan.set_boundary_buffer_count(2);
  plan.set_update_mode(v1::UPDATE_MODE_OVERLAPPED);
  plan.set_reduction(v1::GRADIENT_REDUCTION_HOST);
  plan.set_accumulation(1);
  plan.set_micro_batch_tokens(8);
  plan.add_optimizer_threads(1);
  plan.set_worker_threads(1);
  for (int rank = 0; rank < rank_count; ++rank) plan.add_rank_numa_node(0);
  return plan;
}

void ScrambleBitNeutral(Random& random, const JobShape& shape, v1::Plan* plan) {
  const auto nodes = static_cast<int>(random.Between(1, shape.max_numa_nodes));
  plan->clear_optimizer_threads();
  for (int node = 0; node < nodes; ++node) {
    plan->add_optimizer_threads(static_cast<int>(random.Between(1, 2)));
  }
  const double resident = random.Chance(0.3) ? 0.0 : 0.4;
  for (v1::UnitPlan& unit : *plan->mutable_units()) {
    unit.set_home(random.Chance(resident) ? v1::STATE_HOME_RESIDENT : v1::STATE_HOME_STREAMED);
    unit.set_delivery(random.Chance(0.5) ? v1::PARAMETER_DELIVERY_SHARD
                                         : v1::PARAMETER_DELIVERY_FULL);
    unit.set_numa_node(static_cast<int>(random.Between(0, nodes - 1)));
  }
  for (v1::LayerPlan& layer : *plan->mutable_layers()) {
    layer.set_boundary(random.Chance(0.6) ? v1::BOUNDARY_HOME_HOST : v1::BOUNDARY_HOME_DEVICE);
    layer.set_retain_mixer(random.Chance(0.3));
    layer.set_retain_mixture(random.Chance(0.3));
  }
  plan->set_chunk_bytes(8192 * random.Between(1, 8));
  plan->set_backlog_bytes(8192 * random.Between(1, 64));
  plan->set_window_count(static_cast<int>(random.Between(1, 3)));
  plan->set_gradient_buffer_count(static_cast<int>(random.Between(1, 3)));
  plan->set_boundary_buffer_count(static_cast<int>(random.Between(1, 3)));
  plan->set_update_mode(plan->accumulation() > 1 || random.Chance(0.4)
                            ? v1::UPDATE_MODE_DEFERRED
                            : v1::UPDATE_MODE_OVERLAPPED);
  for (int& node : *plan->mutable_rank_numa_node())
    node = static_cast<int>(random.Between(0, nodes - 1));
}

std::unique_ptr<TestJob> RandomJob(uint64_t seed, const JobShape& shape) {
  Random random(seed);
  auto job = std::make_unique<TestJob>();
  job->model = RandomModel(random, shape);
  job->plan = PlainPlan(job->model, static_cast<int>(random.Between(1, shape.max_ranks)));
  if (random.Chance(0.4)) job->plan.set_precision(v1::PRECISION_FLOAT32);
  if (shape.may_accumulate && random.Chance(0.3)) {
    job->plan.set_accumulation(static_cast<int>(random.Between(2, 3)));
  }
  if (job->plan.accumulation() == 1 && random.Chance(0.5)) {
    job->plan.set_reduction(job->plan.precision() == v1::PRECISION_FLOAT32 || random.Chance(0.5)
                                ? v1::GRADIENT_REDUCTION_DEVICE_FLOAT32
                                : v1::GRADIENT_REDUCTION_DEVICE_BFLOAT16);
  }
  job->plan.set_micro_batch_tokens(random.Between(1, 3) * 4);
  job->plan.mutable_partitions()->set_attention_head_group_count(random.Chance(0.3) ? 2 : 1);
  ScrambleBitNeutral(random, shape, &job->plan);
  job->Derive();
  return job;
}

void TestJob::Derive() {
  const Status valid = ValidatePlan(model, plan);
  if (!valid.ok()) std::fprintf(stderr, "%s\n", valid.ToString().c_str());
  OOM_CHECK(valid.ok());
  batch = {.micro_batch_sequences = plan.micro_batch_tokens() / 4,
           .sequence_length = 4,
           .accumulation = plan.accumulation()};
  layout = std::make_unique<SharedLayout>(SharedLayout::Build(model, plan, batch));
  graph =
      BuildTrainingGraph({.model = &model, .plan = &plan, .layout = layout.get(), .batch = batch});
}

void TestPools::Free::operator()(std::byte* bytes) const { std::free(bytes); }

TestPools::TestPools(const SharedLayout& layout) {
  for (const PoolSpec& pool : layout.pools()) {
    auto* bytes =
        static_cast<std::byte*>(std::aligned_alloc(4096, static_cast<size_t>(pool.bytes)));
    OOM_CHECK(bytes != nullptr);
    std::memset(bytes, 0, static_cast<size_t>(pool.bytes));
    memory_.emplace_back(bytes);
    map_.bases.push_back(bytes);
  }
}

}  // namespace oom::testing
