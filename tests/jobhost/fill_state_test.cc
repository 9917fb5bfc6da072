#include "server/jobhost/fill_state.h"

#include <gtest/gtest.h>

#include <set>

#include "runtime/checkpoint/raw_state.h"
#include "tests/jobhost/job_fixture.h"

namespace oom {
namespace {

ModelDescription TinyModel() {
  ModelDescription model;
  model.hidden_size = 32;
  model.vocabulary_size = 300;
  model.expert_count = 4;
  model.experts_per_token = 2;
  model.expert_width = 16;
  model.layers.resize(2);
  for (LayerDescription& layer : model.layers) {
    layer.attention = {.query_head_count = 2,
                       .kv_head_count = 1,
                       .head_size = 16,
                       .query_key_norm = true,
                       .rotary = {.size = 16, .pair_count = 8}};
  }
  return model;
}

// State that says where it belongs, and counts who reads how much.
class NamedSource : public StateSource {
 public:
  static float Value(int64_t unit, int64_t tensor, StateArray array, int64_t element) {
    return static_cast<float>(unit * 1000 + tensor * 100 + static_cast<int64_t>(array) * 10) +
           static_cast<float>(element % 1024) / 1024.0f;
  }
  Status Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
              std::span<float> out) const override {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = Value(unit, tensor, array, first_element + static_cast<int64_t>(i));
    }
    return Status::Ok();
  }
  int64_t step() const override { return 0; }
};

class FillStateTest : public ::testing::TestWithParam<v1::Precision> {
 protected:
  FillStateTest() : topology_(FakeNumaTopology::TwoNodes(int64_t{1} << 30)) {
    v1::Plan plan = TinyPlan();
    plan.set_precision(GetParam());
    plan.clear_units();
    for (const ParameterUnit& unit : BuildUnits(TinyModel(), 2)) {
      v1::UnitPlan& unit_plan = *plan.add_units();
      unit_plan.set_unit(unit.name);
      unit_plan.set_home(unit.kind == UnitKind::kEmbedding ? v1::STATE_HOME_RESIDENT
                                                           : v1::STATE_HOME_STREAMED);
      unit_plan.set_numa_node(static_cast<int32_t>(unit.index % 2));
    }
    plan.clear_layers();
    layout_ = std::make_unique<SharedLayout>(SharedLayout::Build(
        TinyModel(), plan, {.micro_batch_sequences = 2, .sequence_length = 16, .accumulation = 1}));
    for (const PoolSpec& pool : layout_->pools()) {
      memory_.emplace_back(static_cast<size_t>(pool.bytes) + 4096, std::byte{0x5A});
      auto base = reinterpret_cast<uintptr_t>(memory_.back().data());
      pools_.bases.push_back(reinterpret_cast<std::byte*>((base + 4095) / 4096 * 4096));
      EXPECT_TRUE(topology_.BindMemory(pools_.bases.back(), pool.bytes, pool.numa_node).ok());
    }
    options_ = {.layout = layout_.get(),
                .pools = &pools_,
                .topology = &topology_,
                .threads_by_node = {2, 2}};
  }

  FakeNumaTopology topology_;
  std::unique_ptr<SharedLayout> layout_;
  std::vector<std::vector<std::byte>> memory_;
  PoolMap pools_;
  FillOptions options_;
};

TEST_P(FillStateTest, EveryPageIsTouchedFirstByAThreadOfItsNodeAndNoByteChanges) {
  const auto before = memory_;
  ASSERT_TRUE(TouchPools(options_).ok());
  EXPECT_EQ(memory_, before);
  int64_t touched_bytes = 0;
  std::set<int> nodes;
  for (const FakeNumaTopology::Access& access : topology_.accesses()) {
    EXPECT_EQ(access.thread_node, access.memory_node);
    EXPECT_EQ(access.access, MemoryAccess::kFirstTouch);
    nodes.insert(access.memory_node);
    touched_bytes += access.bytes;
  }
  int64_t pool_bytes = 0;
  for (const PoolSpec& pool : layout_->pools()) {
    // Touched when the first checkpoint is taken.
    if (!pool.name.starts_with("snapshot.")) pool_bytes += pool.bytes;
  }
  EXPECT_EQ(touched_bytes, pool_bytes);
  EXPECT_EQ(nodes.size(), 2u);
}

TEST_P(FillStateTest, StreamedChunksHoldTheSourceAndZeroInThePadding) {
  ASSERT_TRUE(FillStreamedState(options_, NamedSource()).ok());
  const Precision precision =
      GetParam() == v1::PRECISION_FLOAT32 ? Precision::kFloat32 : Precision::kBfloat16;
  for (const Chunk& chunk : layout_->chunks()) {
    const std::byte* weights = pools_.At(layout_->weights(chunk.index));
    if (chunk.owner_rank >= 0) {
      EXPECT_EQ(weights[0], std::byte{0x5A}) << "a resident chunk is its owner's";
      continue;
    }
    const ParameterUnit& unit = layout_->units()[chunk.unit];
    std::vector<float> wanted[3];
    for (int a = 0; a < 3; ++a) {
      std::vector<float> whole(static_cast<size_t>(unit.elements), 0.0f);
      for (size_t t = 0; t < unit.tensors.size(); ++t) {
        for (int64_t i = 0; i < unit.tensors[t].elements; ++i) {
          whole[unit.tensors[t].offset_elements + i] = NamedSource::Value(
              unit.index, static_cast<int64_t>(t), static_cast<StateArray>(a), i);
        }
      }
      wanted[a].assign(whole.begin() + chunk.first_element,
                       whole.begin() + chunk.first_element + chunk.elements);
    }
    std::vector<float> found[3] = {wanted[0], wanted[1], wanted[2]};
    for (auto& array : found) std::fill(array.begin(), array.end(), -1.0f);
    RawToFloat(precision,
               {.weights = pools_.At(layout_->weights(chunk.index)),
                .rest = pools_.At(layout_->rest(chunk.index)),
                .elements = chunk.elements},
               0, found[0], found[1], found[2]);
    for (int a = 0; a < 3; ++a) EXPECT_EQ(found[a], wanted[a]) << unit.name << " array " << a;
  }
}

TEST_P(FillStateTest, AnAbortedLoadEndsWithAborted) {
  options_.cancelled = [] { return true; };
  EXPECT_EQ(FillStreamedState(options_, NamedSource()).code(), Code::kAborted);
}

INSTANTIATE_TEST_SUITE_P(Precisions, FillStateTest,
                         ::testing::Values(v1::PRECISION_FLOAT32, v1::PRECISION_BFLOAT16));

}  // namespace
}  // namespace oom
