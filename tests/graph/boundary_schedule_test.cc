// Goal: inputs on their way back never lie beside the workspace of a grouped attention above them,
// and elsewhere come as early as the plan's places would let them.

#include "runtime/graph/boundary_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/graph/engine_testing.h"

namespace oom::testing {
namespace {

using Layers = std::vector<int64_t>;

// Attention where `kinds` has an a, Gated DeltaNet where it has a d; from the bottom up.
ModelDescription ModelOf(const std::string& kinds) {
  ModelDescription model;
  for (const char kind : kinds) {
    LayerDescription layer;
    layer.mixer = kind == 'a' ? MixerKind::kAttention : MixerKind::kDeltaNet;
    layer.attention.kv_head_count = 2;
    layer.attention.query_head_count = 4;
    model.layers.push_back(layer);
  }
  return model;
}

v1::Plan PlanOf(const ModelDescription& model, int groups, int places) {
  v1::Plan plan;
  plan.mutable_partitions()->set_attention_head_group_count(groups);
  plan.set_boundary_buffer_count(places);
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) {
    plan.add_layers()->set_boundary(v1::BOUNDARY_HOME_HOST);
  }
  return plan;
}

TEST(BoundaryScheduleTest, WithoutGroupsThePlansPlacesTakeTurns) {
  for (const std::string kinds : {"dada", "dddd"}) {
    const ModelDescription model = ModelOf(kinds);
    const BoundarySchedule schedule(model, PlanOf(model, kinds == "dada" ? 1 : 2, 2));
    EXPECT_FALSE(schedule.taken_on_demand()) << kinds;
    for (int64_t layer = 0; layer <= 4; ++layer) EXPECT_TRUE(schedule.TakenBehind(layer).empty());
  }
}

TEST(BoundaryScheduleTest, BelowAGroupedAttentionAnInputWaitsForItsBackward) {
  const ModelDescription model = ModelOf(
      "ddda"
      "ddda");
  const BoundarySchedule schedule(model, PlanOf(model, 2, 2));
  EXPECT_TRUE(schedule.taken_on_demand());
  EXPECT_EQ(schedule.TakenBehind(8), (Layers{7}));  // Under the head; 6 is below an attention.
  EXPECT_EQ(schedule.TakenBehind(7), (Layers{6, 5}));
  EXPECT_EQ(schedule.TakenBehind(6), (Layers{4}));
  EXPECT_EQ(schedule.TakenBehind(5), (Layers{3}));
  EXPECT_EQ(schedule.TakenBehind(4), (Layers{}));
  EXPECT_EQ(schedule.TakenBehind(3), (Layers{2, 1}));
  EXPECT_EQ(schedule.TakenBehind(2), (Layers{0}));
}

TEST(BoundaryScheduleTest, OnlyWhatLeftForTheHostComesBack) {
  const ModelDescription model = ModelOf("dad");
  v1::Plan plan = PlanOf(model, 2, 1);
  plan.mutable_layers(0)->set_boundary(v1::BOUNDARY_HOME_DEVICE);
  plan.mutable_layers(1)->set_retain_mixer(true);
  const BoundarySchedule schedule(model, plan);
  EXPECT_FALSE(schedule.Returns(0));
  EXPECT_FALSE(schedule.Returns(1));
  EXPECT_TRUE(schedule.Returns(2));
  EXPECT_EQ(schedule.TakenBehind(3), (Layers{2}));
  EXPECT_TRUE(schedule.TakenBehind(1).empty());
}

// The graph keeps what the schedule says: a place that the operators give is taken by an earlier
// compute node, and below a grouped attention by that layer's backward.
TEST(BoundaryScheduleTest, TheLoadComesAfterTheNodeThatTakesItsPlace) {
  int on_demand = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const auto job = RandomJob(seed, JobShape{});
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
    const BoundarySchedule schedule(job->model, job->plan);
    std::map<std::pair<int, int64_t>, int64_t>
        taken;  // Micro-batch and layer to the node that takes the place.
    const std::vector<Node>& nodes = job->graph.nodes;
    for (size_t i = 0; i < nodes.size(); ++i) {
      for (const int64_t layer : nodes[i].takes) {
        ASSERT_EQ(nodes[i].resource, Resource::kCompute);
        ASSERT_TRUE(taken.emplace(std::pair(nodes[i].micro_batch, layer), i).second);
      }
      if (nodes[i].kind != NodeKind::kLoadBoundary) continue;
      const Buffer& place = job->graph.buffers[static_cast<size_t>(nodes[i].buffer)];
      ASSERT_EQ(place.bytes == 0, schedule.taken_on_demand());
      if (!schedule.taken_on_demand()) continue;
      ++on_demand;
      const int64_t taker = taken.at({nodes[i].micro_batch, nodes[i].layer});
      ASSERT_TRUE(
          std::any_of(nodes[i].predecessors.begin(), nodes[i].predecessors.end(),
                      [&](const Edge& edge) { return edge.distance == 0 && edge.node == taker; }));
      const int64_t above = nodes[i].layer + 1;
      if (above < job->model.layer_count() && job->model.layer(above).attention.kv_head_count > 1) {
        ASSERT_EQ(nodes[static_cast<size_t>(taker)].kind, NodeKind::kBackwardMixer);
        ASSERT_EQ(nodes[static_cast<size_t>(taker)].layer, above);
      }
    }
    if (!schedule.taken_on_demand()) {
      ASSERT_TRUE(taken.empty());
    }
  }
  EXPECT_GT(on_demand, 20);
}

}  // namespace
}  // namespace oom::testing
