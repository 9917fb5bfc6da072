// Goal: device memory that nothing else needs keeps activations: never more than there is, what is
// dearest to replay first, and everything where everything fits.

#include "planner/kept_activations.h"

#include <gtest/gtest.h>

#include "planner/memory_account.h"
#include "planner/resource_bounds.h"
#include "runtime/model/hf_config.h"

namespace oom::testing {
namespace {

constexpr BatchShape kBatch = {.micro_batch_sequences = 4, .sequence_length = 4096};

class KeptActivationsTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto read = ReadHfConfig(std::string(OOM_SOURCE_DIR "/geometries/") + GetParam() + "/config.json");
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    model_ = *read;
    replaying_.set_cuda_devices(true);
    replaying_.set_accumulation(1);
    replaying_.mutable_partitions()->set_head_chunk_tokens(1024);
    for (int64_t layer = 0; layer < model_.layer_count(); ++layer) {
      replaying_.add_layers()->set_boundary(v1::BOUNDARY_HOME_HOST);
    }
  }

  // Beyond a plan that keeps nothing.
  int64_t BytesOf(const v1::Plan& plan) const {
    return OperatorBytes(model_, plan, kBatch, /*float32=*/false) -
           OperatorBytes(model_, replaying_, kBatch, /*float32=*/false);
  }
  int64_t FragmentationOf(const v1::Plan& plan) const {
    return OperatorBytes(model_, plan, kBatch, /*float32=*/false) / 16;
  }
  double FlopsOf(const v1::Plan& plan) const { return StepFlops(model_, plan, kBatch); }

  v1::Plan KeptWithin(int64_t room_bytes) const {
    v1::Plan plan = replaying_;
    KeepActivations(model_, kBatch, /*float32=*/false, room_bytes, &plan);
    return plan;
  }

  ModelDescription model_;
  v1::Plan replaying_;
};

TEST_P(KeptActivationsTest, WhatIsKeptFitsAndGrowsWithTheRoom) {
  const v1::Plan all = KeptWithin(int64_t{1} << 50);
  for (const v1::LayerPlan& layer : all.layers()) {
    EXPECT_TRUE(layer.retain_mixer() && layer.retain_mixture());
  }
  const int64_t most = BytesOf(all);
  EXPECT_LT(FlopsOf(all), 0.85 * FlopsOf(replaying_));

  double least_flops = FlopsOf(replaying_);
  for (int tenth = 0; tenth < 10; ++tenth) {
    const int64_t room = FragmentationOf(all) + most * tenth / 10;
    const v1::Plan plan = KeptWithin(room);
    EXPECT_LE(BytesOf(plan) + FragmentationOf(plan), room);
    // No layer's part is a tenth of it all, so something of each tenth is of use. The first gets what backward begins with:
    // it would be replayed at once.
    EXPECT_LT(FlopsOf(plan), least_flops) << tenth;
    least_flops = FlopsOf(plan);
  }
}

TEST_P(KeptActivationsTest, NothingIsKeptThatOnlyJustFits) {
  const v1::Plan none = KeptWithin(FragmentationOf(replaying_) - 1);
  EXPECT_EQ(FlopsOf(none), FlopsOf(replaying_));
}

TEST_P(KeptActivationsTest, TheFirstPartKeptIsTheDearestToReplayAByte) {
  int64_t room = FragmentationOf(replaying_);
  const v1::Plan free = KeptWithin(room);
  v1::Plan first = free;
  while (FlopsOf(first) == FlopsOf(free)) {
    room += int64_t{1} << 24;
    first = KeptWithin(room);
  }
  // Any other part that would fit saves no more.
  for (int layer = 0; layer < free.layers_size(); ++layer) {
    for (const bool is_mixer : {true, false}) {
      v1::Plan other = free;
      v1::LayerPlan* part = other.mutable_layers(layer);
      is_mixer ? part->set_retain_mixer(true) : part->set_retain_mixture(true);
      if (BytesOf(other) + FragmentationOf(other) > room) continue;
      EXPECT_GE(FlopsOf(other), FlopsOf(first) * (1 - 1e-9)) << layer << is_mixer;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries, KeptActivationsTest,
                         ::testing::Values("mixtral-8x7b", "qwen3-30b-a3b", "qwen3.6-35b-a3b", "gemma4-26b-a4b"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

}  // namespace
}  // namespace oom::testing
