// Defaults that job.proto documents, and every refusal by its field.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "planner/plan_job.h"

namespace oom {
namespace {

v1::JobSpec Minimal() {
  v1::JobSpec spec;
  spec.mutable_model()->set_path("/models/m");
  spec.mutable_data()->set_train("/data/train");
  spec.set_sequence_length(128);
  spec.set_global_batch(8);
  spec.set_steps(100);
  spec.set_output("/out");
  return spec;
}

void SetYarn(v1::JobSpec* spec, double factor, int64_t original) {
  v1::RopeScaling* scaling = spec->mutable_model()->mutable_rope_scaling();
  scaling->set_kind(v1::ROPE_SCALING_KIND_YARN);
  scaling->set_factor(factor);
  scaling->set_original_max_position_embeddings(original);
}

TEST(NormalizeJobSpec, FillsInWhatTheProtoDocuments) {
  v1::JobSpec spec = Minimal();
  const Status status = NormalizeJobSpec(&spec);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(spec.data().shuffle());
  EXPECT_EQ(spec.accumulation(), 1);
  EXPECT_EQ(spec.devices().kind(), v1::DEVICE_KIND_CPU);
  EXPECT_EQ(spec.devices().count(), 1);
  EXPECT_EQ(spec.optimizer().learning_rate(), 3e-4);
  ASSERT_EQ(spec.optimizer().betas_size(), 2);
  EXPECT_EQ(spec.optimizer().betas(0), 0.9);
  EXPECT_EQ(spec.optimizer().betas(1), 0.95);
  EXPECT_EQ(spec.optimizer().epsilon(), 1e-8);
  EXPECT_EQ(spec.optimizer().weight_decay(), 0.1);
  EXPECT_EQ(spec.optimizer().max_gradient_norm(), 0.0);
  EXPECT_EQ(spec.schedule().kind(), v1::SCHEDULE_KIND_CONSTANT);
  EXPECT_EQ(spec.schedule().decay_fraction(), 0.1);
  EXPECT_EQ(spec.checkpoint().keep(), 3);
  EXPECT_EQ(spec.resume(), "auto");
  EXPECT_EQ(spec.plan(), "auto");
  EXPECT_EQ(spec.evaluation().sequences(), 64);
  EXPECT_EQ(spec.seed(), 1u);
  EXPECT_EQ(spec.precision(), v1::PRECISION_BFLOAT16);
  EXPECT_EQ(spec.retry().max_failures(), 3);
  EXPECT_EQ(spec.trace().first_step(), 3);
  EXPECT_EQ(spec.trace().step_count(), 2);
}

// Goal: what the user gave stays, zeros that mean something included, and normalising twice changes
// nothing.
TEST(NormalizeJobSpec, KeepsWhatWasGivenAndIsIdempotent) {
  v1::JobSpec spec = Minimal();
  spec.mutable_optimizer()->set_learning_rate(0.0);
  spec.mutable_optimizer()->set_weight_decay(0.0);
  spec.mutable_data()->set_shuffle(false);
  spec.mutable_retry()->set_max_failures(0);
  spec.mutable_trace()->set_step_count(0);
  spec.set_seed(9);
  ASSERT_TRUE(NormalizeJobSpec(&spec).ok());
  EXPECT_EQ(spec.optimizer().learning_rate(), 0.0);
  EXPECT_EQ(spec.optimizer().weight_decay(), 0.0);
  EXPECT_FALSE(spec.data().shuffle());
  EXPECT_EQ(spec.retry().max_failures(), 0);
  EXPECT_EQ(spec.trace().step_count(), 0);
  EXPECT_EQ(spec.seed(), 9u);
  const std::string once = spec.SerializeAsString();
  ASSERT_TRUE(NormalizeJobSpec(&spec).ok());
  EXPECT_EQ(spec.SerializeAsString(), once);
}

// A model of a configuration alone, without data and output; what it does give is checked as ever.
TEST(NormalizeJobSpec, AGeometryNeedsNeitherDataNorOutput) {
  v1::JobSpec geometry = Minimal();
  geometry.mutable_model()->clear_path();
  geometry.mutable_model()->set_config("/c.json");
  geometry.mutable_model()->set_initialize(v1::INITIALIZATION_RANDOM);
  geometry.clear_data();
  geometry.clear_output();
  v1::JobSpec spec = geometry;
  EXPECT_TRUE(NormalizeJobSpec(&spec).ok());
  EXPECT_EQ(spec.precision(), v1::PRECISION_BFLOAT16);
  const auto field_of = [&](const std::function<void(v1::JobSpec*)>& change) {
    v1::JobSpec changed = geometry;
    change(&changed);
    return NormalizeJobSpec(&changed).field();
  };
  EXPECT_EQ(field_of([](v1::JobSpec* s) { s->mutable_data()->set_train("/data"); }), "output");
  EXPECT_EQ(field_of([](v1::JobSpec* s) { s->set_output("/out"); }), "data.train");
  EXPECT_EQ(field_of([](v1::JobSpec* s) { s->clear_global_batch(); }), "global_batch");
  EXPECT_EQ(field_of([](v1::JobSpec* s) { s->mutable_model()->clear_initialize(); }),
            "model.initialize");
}

TEST(NormalizeJobSpec, RefusesByField) {
  using Spec = v1::JobSpec;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::string, std::function<void(Spec*)>>> cases = {
      {"model", [](Spec* s) { s->clear_model(); }},
      {"model", [](Spec* s) { s->mutable_model()->set_config("/c.json"); }},
      {"model.path", [](Spec* s) { s->mutable_model()->set_path("relative"); }},
      {"model.initialize",
       [](Spec* s) {
         s->mutable_model()->clear_path();
         s->mutable_model()->set_config("/c.json");
       }},
      {"model.config",
       [](Spec* s) {
         s->mutable_model()->clear_path();
         s->mutable_model()->set_config("c.json");
         s->mutable_model()->set_initialize(v1::INITIALIZATION_RANDOM);
       }},
      {"model.rope_scaling.kind",
       [](Spec* s) { s->mutable_model()->mutable_rope_scaling()->set_factor(2.0); }},
      {"model.rope_scaling.factor", [](Spec* s) { SetYarn(s, 0.5, 0); }},
      {"model.rope_scaling.factor", [=](Spec* s) { SetYarn(s, nan, 0); }},
      {"model.rope_scaling.factor", [=](Spec* s) { SetYarn(s, infinity, 0); }},
      {"model.rope_scaling.original_max_position_embeddings", [](Spec* s) { SetYarn(s, 2.0, -1); }},
      {"data.train", [](Spec* s) { s->mutable_data()->clear_train(); }},
      {"data.train", [](Spec* s) { s->mutable_data()->set_train("./data"); }},
      {"data.evaluation", [](Spec* s) { s->mutable_data()->set_evaluation("data"); }},
      {"data.evaluation", [](Spec* s) { s->mutable_evaluation()->set_every_steps(5); }},
      {"sequence_length", [](Spec* s) { s->clear_sequence_length(); }},
      {"sequence_length", [](Spec* s) { s->set_sequence_length(-1); }},
      {"sequence_length", [](Spec* s) { s->set_sequence_length((1 << 24) + 1); }},
      {"global_batch", [](Spec* s) { s->clear_global_batch(); }},
      {"global_batch", [](Spec* s) { s->set_global_batch(int64_t{1} << 40); }},
      {"global_batch", [](Spec* s) { s->mutable_devices()->set_count(3); }},
      {"global_batch", [](Spec* s) { s->set_accumulation(3); }},
      {"global_batch",
       [](Spec* s) {
         s->set_global_batch(1 << 24);
         s->set_sequence_length(1 << 24);
       }},
      {"accumulation", [](Spec* s) { s->set_accumulation(-1); }},
      {"steps", [](Spec* s) { s->clear_steps(); }},
      {"steps", [](Spec* s) { s->set_steps(-3); }},
      {"devices.count", [](Spec* s) { s->mutable_devices()->set_count(-1); }},
      {"devices.count", [](Spec* s) { s->mutable_devices()->set_count(65); }},
      {"optimizer.learning_rate",
       [](Spec* s) { s->mutable_optimizer()->set_learning_rate(-1e-3); }},
      {"optimizer.learning_rate", [=](Spec* s) { s->mutable_optimizer()->set_learning_rate(nan); }},
      {"optimizer.betas", [](Spec* s) { s->mutable_optimizer()->add_betas(0.9); }},
      {"optimizer.betas",
       [](Spec* s) {
         s->mutable_optimizer()->add_betas(0.9);
         s->mutable_optimizer()->add_betas(1.0);
       }},
      {"optimizer.betas",
       [=](Spec* s) {
         s->mutable_optimizer()->add_betas(nan);
         s->mutable_optimizer()->add_betas(0.9);
       }},
      {"optimizer.epsilon", [](Spec* s) { s->mutable_optimizer()->set_epsilon(0.0); }},
      {"optimizer.epsilon", [=](Spec* s) { s->mutable_optimizer()->set_epsilon(infinity); }},
      {"optimizer.weight_decay", [](Spec* s) { s->mutable_optimizer()->set_weight_decay(-0.1); }},
      {"optimizer.max_gradient_norm",
       [](Spec* s) { s->mutable_optimizer()->set_max_gradient_norm(-1.0); }},
      {"optimizer.max_gradient_norm",
       [=](Spec* s) { s->mutable_optimizer()->set_max_gradient_norm(nan); }},
      {"schedule.warmup_steps", [](Spec* s) { s->mutable_schedule()->set_warmup_steps(101); }},
      {"schedule.warmup_steps", [](Spec* s) { s->mutable_schedule()->set_warmup_steps(-1); }},
      {"schedule.minimum_ratio", [](Spec* s) { s->mutable_schedule()->set_minimum_ratio(1.5); }},
      {"schedule.decay_fraction", [=](Spec* s) { s->mutable_schedule()->set_decay_fraction(nan); }},
      {"output", [](Spec* s) { s->clear_output(); }},
      {"output", [](Spec* s) { s->set_output("out"); }},
      {"checkpoint.every_steps", [](Spec* s) { s->mutable_checkpoint()->set_every_steps(-1); }},
      {"checkpoint.keep", [](Spec* s) { s->mutable_checkpoint()->set_keep(1); }},
      {"checkpoint.keep", [](Spec* s) { s->mutable_checkpoint()->set_keep(2000000000); }},
      {"resume", [](Spec* s) { s->set_resume("newest"); }},
      {"resume", [](Spec* s) { s->set_resume("/" + std::string(5000, 'x')); }},
      {"data.train", [](Spec* s) { s->mutable_data()->set_train("../../etc"); }},
      {"data.train", [](Spec* s) { s->mutable_data()->set_train(std::string("/a\0b", 4)); }},
      {"plan", [](Spec* s) { s->set_plan("plan.json"); }},
      {"evaluation.every_steps", [](Spec* s) { s->mutable_evaluation()->set_every_steps(-1); }},
      {"evaluation.sequences", [](Spec* s) { s->mutable_evaluation()->set_sequences(-1); }},
      {"trace", [](Spec* s) { s->mutable_trace()->set_first_step(-1); }},
      {"trace", [](Spec* s) { s->mutable_trace()->set_step_count(1001); }},
      {"router.auxiliary_loss", [](Spec* s) { s->mutable_router()->set_auxiliary_loss(-0.1); }},
      {"router.auxiliary_loss", [=](Spec* s) { s->mutable_router()->set_auxiliary_loss(nan); }},
      {"router.auxiliary_loss",
       [](Spec* s) {
         s->mutable_router()->set_auxiliary_loss(0.02);
         s->set_accumulation(2);
       }},
      {"budgets.gpu_memory", [](Spec* s) { s->mutable_budgets()->set_gpu_memory_bytes(-1); }},
      {"budgets.host_memory", [](Spec* s) { s->mutable_budgets()->add_host_memory_bytes(-1); }},
      {"priority", [](Spec* s) { s->set_priority(1001); }},
      {"priority", [](Spec* s) { s->set_priority(-1001); }},
      {"retry.max_failures", [](Spec* s) { s->mutable_retry()->set_max_failures(-1); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::JobSpec spec = Minimal();
    cases[i].second(&spec);
    const Status status = NormalizeJobSpec(&spec);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << "case " << i << " of " << cases[i].first;
    EXPECT_EQ(status.reason(), "INVALID_INPUT") << "case " << i;
    EXPECT_EQ(status.field(), cases[i].first) << "case " << i << ": " << status.ToString();
    EXPECT_EQ(status.message().rfind(cases[i].first, 0), 0u) << status.message();
  }
}

}  // namespace
}  // namespace oom
