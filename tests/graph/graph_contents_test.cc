// What built step graphs consist of, over random models and plans (engine rules, section 4 and 13):
// the units in the windows, the nodes that the plan asks for, their bytes, and what evaluation
// leaves out.

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "runtime/graph/graph_builder.h"
#include "tests/graph/engine_testing.h"
#include "tests/graph/graph_fixture.h"
#include "tests/graph/graph_order.h"

namespace oom::testing {
namespace {

// Goal: a node finds the unit that it needs in its window; a unit that is there is not loaded
// again; the head comes once a step.
TEST_F(GraphTest, WindowsHoldWhatNodesUseAndNothingIsLoadedTwice) {
  ForJobs([](const TestJob& job) {
    const SharedLayout& layout = *job.layout;
    std::map<int64_t, int64_t> content;  // Window to unit.
    int head_loads = 0;
    for (const Node& node : job.graph.nodes) {
      if (node.kind == NodeKind::kLoadUnit) {
        for (const auto& [window, unit] : content) {
          ASSERT_NE(unit, node.unit) << "unit " << unit << " is still in "
                                     << job.graph.buffers[static_cast<size_t>(window)].name;
        }
        content[node.buffer] = node.unit;
        const ParameterUnit& unit = layout.units()[static_cast<size_t>(node.unit)];
        head_loads += unit.kind == UnitKind::kHead ? 1 : 0;
        ASSERT_GE(job.graph.buffers[static_cast<size_t>(node.buffer)].bytes,
                  unit.elements * layout.weight_bytes());
      }
      if (!UsesWeights(node.kind)) continue;
      for (const ParameterUnit& unit : layout.units()) {
        const bool head = node.layer < 0;
        int64_t buffer = -1;
        if (head && unit.kind == UnitKind::kHead) buffer = node.weights;
        if (head && unit.kind == UnitKind::kEmbedding && job.model.tied_embedding)
          buffer = node.mixture_weights;
        if (!head && unit.layer == node.layer && unit.kind == UnitKind::kLayer)
          buffer = node.weights;
        if (!head && unit.layer == node.layer && unit.kind == UnitKind::kExperts)
          buffer = node.mixture_weights;
        if (buffer < 0) continue;
        if (layout.resident(unit.index) && layout.rank_count() == 1) {
          ASSERT_EQ(job.graph.buffers[static_cast<size_t>(buffer)].name, "resident." + unit.name);
        } else {
          ASSERT_EQ(content.at(buffer), unit.index) << NodeKindName(node.kind);
        }
      }
    }
    const auto head = static_cast<int64_t>(layout.units().size()) - 1;
    ASSERT_EQ(head_loads, layout.resident(head) && layout.rank_count() == 1 ? 0 : 1);
  });
}

// Goal: replay only what is not retained, boundaries only where the plan keeps them on the host, no
// copy for what is resident.
TEST_F(GraphTest, NodesFollowThePlan) {
  ForJobs([](const TestJob& job) {
    std::map<NodeKind, std::map<int64_t, int>> count;
    for (const Node& node : job.graph.nodes) {
      ++count[node.kind][node.layer];
      const bool of_resident = node.unit >= 0 && job.layout->resident(node.unit);
      if (of_resident && node.kind != NodeKind::kGatherRows) {
        ASSERT_NE(node.resource, Resource::kHostToDevice);
        ASSERT_NE(node.resource, Resource::kDeviceToHost);
      }
      if (of_resident) {
        ASSERT_NE(node.resource, Resource::kHostOptimizer);
        if (node.resource == Resource::kHostToDevice) {
          ASSERT_EQ(node.bytes, 0);
        }
      }
    }
    const int passes = job.plan.accumulation();
    for (int64_t layer = 0; layer < job.model.layer_count(); ++layer) {
      const v1::LayerPlan& plan = job.plan.layers(static_cast<int>(layer));
      const bool stored = plan.boundary() == v1::BOUNDARY_HOME_HOST && !plan.retain_mixer();
      EXPECT_EQ(count[NodeKind::kReplayMixer][layer], plan.retain_mixer() ? 0 : passes);
      EXPECT_EQ(count[NodeKind::kReplayMixture][layer], plan.retain_mixture() ? 0 : passes);
      EXPECT_EQ(count[NodeKind::kStoreBoundary][layer], stored ? passes : 0);
      EXPECT_EQ(count[NodeKind::kLoadBoundary][layer], stored ? passes : 0);
      EXPECT_EQ(count[NodeKind::kForwardMixer][layer], passes);
      EXPECT_EQ(count[NodeKind::kForwardMixture][layer], passes);
      EXPECT_EQ(count[NodeKind::kBackwardMixture][layer], passes);
      EXPECT_EQ(count[NodeKind::kBackwardMixer][layer], passes);
    }
    EXPECT_EQ(count[NodeKind::kHead][-1], passes);
    EXPECT_EQ(count[NodeKind::kStoreRows][-1], job.model.tied_embedding ? 0 : 1);
    EXPECT_EQ(count[NodeKind::kClip][-1],
              job.plan.update_mode() == v1::UPDATE_MODE_DEFERRED ? 1 : 0);
  });
}

// Goal: bytes of each resource by closed formulas. A unit i of the n in its window class (w
// windows, A micro-batches) is loaded once at the start, again at each turn to backward unless it
// is among the last w, and again at each turn to the next micro-batch unless it is among the first
// w.
TEST_F(GraphTest, BytesFollowClosedFormulas) {
  ForJobs([](const TestJob& job) {
    const SharedLayout& layout = *job.layout;
    const int64_t a = job.plan.accumulation();
    const int64_t tokens_bytes =
        job.batch.micro_batch_tokens() * job.model.hidden_size * layout.activation_bytes();
    const int64_t ranks = layout.rank_count();
    const bool in_place = ranks == 1;
    const int64_t reduced_bytes =
        job.plan.reduction() == v1::GRADIENT_REDUCTION_DEVICE_FLOAT32 ? 4 : 2;
    std::map<Resource, int64_t> expected, actual;
    std::map<UnitKind, std::vector<int64_t>> classes;
    for (const ParameterUnit& unit : layout.units()) {
      const bool resident = layout.resident(unit.index);
      if (unit.kind == UnitKind::kEmbedding) {
        if (!resident) expected[Resource::kHostToDevice] += a * tokens_bytes;
        if (!job.model.tied_embedding) continue;
      }
      if (!(resident && in_place)) classes[unit.kind].push_back(unit.index);
      const bool reduces = job.plan.reduction() != v1::GRADIENT_REDUCTION_HOST && !in_place;
      const int64_t gradients = a * unit.elements / (reduces ? ranks : 1) * layout.gradient_bytes();
      if (reduces) {
        expected[Resource::kCollective] += unit.elements / ranks * reduced_bytes * (ranks - 1);
      }
      if (!resident) expected[Resource::kDeviceToHost] += gradients;
      if (resident && !in_place) expected[Resource::kCollective] += gradients;
    }
    for (const auto& [kind, units] : classes) {
      const auto n = static_cast<int64_t>(units.size());
      const bool once = kind == UnitKind::kHead || kind == UnitKind::kEmbedding;
      const int64_t w = once ? 1 : job.plan.window_count();
      for (int64_t i = 0; i < n; ++i) {
        int64_t loads = 1 + (i < n - w ? a : 0) + (i >= w ? a - 1 : 0);
        const ParameterUnit& unit =
            layout.units()[static_cast<size_t>(units[static_cast<size_t>(i)])];
        if (once) loads = 1;
        const int64_t weights = loads * unit.elements * layout.weight_bytes();
        const bool resident = layout.resident(unit.index);
        const bool shards =
            !resident && !in_place &&
            job.plan.units(static_cast<int>(unit.index)).delivery() == v1::PARAMETER_DELIVERY_SHARD;
        expected[resident ? Resource::kCollective : Resource::kHostToDevice] +=
            shards ? weights / ranks : weights;
        if (shards) expected[Resource::kCollective] += weights - weights / ranks;
      }
    }
    for (const v1::LayerPlan& layer : job.plan.layers()) {
      if (layer.boundary() != v1::BOUNDARY_HOME_HOST || layer.retain_mixer()) continue;
      expected[Resource::kBoundaryOut] += a * tokens_bytes;
      expected[Resource::kBoundaryIn] += a * tokens_bytes;
    }
    for (const Node& node : job.graph.nodes) {
      if (node.kind == NodeKind::kUpdate) {
        // An embedding's partials are rows, as many as the batch has, unless it is tied.
        const bool rows = layout.gradient_by_row(node.unit);
        const bool reduces = job.plan.reduction() != v1::GRADIENT_REDUCTION_HOST;
        const int64_t per_element =
            24 + (rows ? 0 : layout.gradient_bytes() * (reduces ? 1 : ranks));
        EXPECT_EQ(node.bytes,
                  layout.chunks()[static_cast<size_t>(node.chunk)].elements * per_element);
      } else if (node.bytes > 0) {
        actual[node.resource] += node.bytes;
      }
    }
    EXPECT_EQ(actual, expected);
  });
}

// Goal: evaluation reads the same units through the same windows, and stores, keeps and updates
// nothing.
TEST_F(GraphTest, EvaluationPublishesNothing) {
  ForJobs([](const TestJob& job) {
    const StepGraph graph = BuildEvaluationGraph(
        {.model = &job.model, .plan = &job.plan, .layout = job.layout.get(), .batch = job.batch});
    const Order order(graph);
    ASSERT_FALSE(order.cyclic());
    const std::set<NodeKind> allowed = {NodeKind::kGatherRows,     NodeKind::kLoadUnit,
                                        NodeKind::kGatherUnit,     NodeKind::kForwardMixer,
                                        NodeKind::kForwardMixture, NodeKind::kEvaluationHead};
    for (const Node& node : graph.nodes)
      ASSERT_TRUE(allowed.contains(node.kind)) << NodeKindName(node.kind);
    std::map<std::string, int64_t> training;
    for (const Buffer& buffer : job.graph.buffers) training[buffer.name] = buffer.bytes;
    for (const Buffer& buffer : graph.buffers) {
      if (buffer.bytes == 0) continue;
      ASSERT_TRUE(training.contains(buffer.name)) << buffer.name;
    }
  });
}

}  // namespace
}  // namespace oom::testing
