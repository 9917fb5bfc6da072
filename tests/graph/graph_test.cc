// Properties of built step graphs over random models and plans (engine rules, section 4 and 13).
// What a node reads and writes is taken from what its kind means, not from the lists that the
// builder made edges of.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "runtime/graph/graph_builder.h"
#include "tests/graph/engine_testing.h"

namespace oom::testing {
namespace {

bool UsesWeights(NodeKind kind) {
  return kind == NodeKind::kForwardMixer || kind == NodeKind::kForwardMixture ||
         kind == NodeKind::kHead || kind == NodeKind::kEvaluationHead ||
         kind == NodeKind::kReplayMixer || kind == NodeKind::kReplayMixture ||
         kind == NodeKind::kBackwardMixture || kind == NodeKind::kBackwardMixer;
}

// What must have ended before what, over two consecutive steps: edges and the order of each device
// stream.
class Order {
 public:
  explicit Order(const StepGraph& graph) : count_(static_cast<int64_t>(graph.nodes.size())) {
    const auto total = static_cast<size_t>(2 * count_);
    std::vector<std::vector<int64_t>> before(total);
    std::map<Resource, int64_t> last;
    for (int64_t i = 0; i < 2 * count_; ++i) {
      const int64_t step = i / count_;
      const Node& node = graph.nodes[static_cast<size_t>(i % count_)];
      for (const Edge& edge : node.predecessors) {
        const int64_t from = edge.node + (step - edge.distance) * count_;
        if (from >= 0) before[static_cast<size_t>(i)].push_back(from);
      }
      if (node.resource == Resource::kHostOptimizer) continue;
      const auto previous = last.find(node.resource);
      if (previous != last.end()) before[static_cast<size_t>(i)].push_back(previous->second);
      last[node.resource] = i;
    }
    // Edges may point forward in issue order (backlog slots), so ancestors are found by search.
    ancestors_.assign(total, std::vector<bool>(total, false));
    std::vector<int> state(total, 0);
    std::function<void(int64_t)> visit = [&](int64_t i) {
      const auto at = static_cast<size_t>(i);
      if (state[at] == 1) cyclic_ = true;
      if (state[at] != 0) return;
      state[at] = 1;
      for (const int64_t from : before[at]) {
        visit(from);
        ancestors_[at][static_cast<size_t>(from)] = true;
        for (size_t j = 0; j < total; ++j) {
          if (ancestors_[static_cast<size_t>(from)][j]) ancestors_[at][j] = true;
        }
      }
      state[at] = 2;
    };
    for (int64_t i = 0; i < 2 * count_; ++i) visit(i);
  }

  bool cyclic() const { return cyclic_; }
  // Node numbers count on in the second step.
  bool Before(int64_t earlier, int64_t later) const {
    return ancestors_[static_cast<size_t>(later)][static_cast<size_t>(earlier)];
  }

 private:
  int64_t count_;
  bool cyclic_ = false;
  std::vector<std::vector<bool>> ancestors_;
};

struct Uses {
  std::set<std::string> reads, writes;
};

Uses UsesOf(const StepGraph& graph, const Node& node) {
  Uses uses;
  const auto name = [&](int64_t buffer) { return graph.buffers[static_cast<size_t>(buffer)].name; };
  const auto add = [&](std::set<std::string>* to, int64_t buffer) {
    if (buffer >= 0) to->insert(name(buffer));
  };
  const std::string layer = std::to_string(node.layer);
  if (UsesWeights(node.kind)) {
    add(&uses.reads, node.weights);
    add(&uses.reads, node.mixture_weights);
    add(&uses.writes, node.gradient);
    add(&uses.writes, node.mixture_gradient);
  }
  switch (node.kind) {
    case NodeKind::kLoadUnit:
      add(&uses.writes, node.buffer);
      break;
    case NodeKind::kStoreGradient:
      add(&uses.reads, node.buffer);
      break;
    case NodeKind::kStoreBoundary:
      uses.reads.insert("input " + layer);
      uses.writes.insert("host boundary " + layer);
      break;
    case NodeKind::kLoadBoundary:
      uses.reads.insert("host boundary " + layer);
      add(&uses.writes, node.buffer);
      break;
    case NodeKind::kGatherRows:
      uses.writes.insert("input 0");
      break;
    case NodeKind::kForwardMixer:
      uses.reads.insert("input " + layer);
      break;
    case NodeKind::kForwardMixture:
      uses.writes.insert("input " + std::to_string(node.layer + 1));
      break;
    case NodeKind::kReplayMixer:
      add(&uses.reads, node.buffer);
      break;
    case NodeKind::kEmbeddingBackward:
      if (node.gradient < 0) uses.writes.insert("rows");
      add(&uses.writes, node.gradient);
      break;
    case NodeKind::kStoreRows:
      uses.reads.insert("rows");
      break;
    default:
      break;
  }
  return uses;
}

class GraphTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kJobs = 60;

  // Calls `check` for many random jobs, every third one's embedding tied; the failing one named.
  static void ForJobs(const std::function<void(const TestJob&)>& check, JobShape shape = {}) {
    for (uint64_t seed = 1; seed <= kJobs; ++seed) {
      shape.tied = seed % 3 == 0;
      const auto job = RandomJob(seed, shape);
      SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
      check(*job);
      if (::testing::Test::HasFailure()) return;
    }
  }
};

// Goal: nobody writes a window, gradient buffer, boundary or row buffer before the last reader of
// what was in it, in this step or the one before.
TEST_F(GraphTest, NoCycleAndEveryWriterWaitsForTheLastReaders) {
  ForJobs([](const TestJob& job) {
    const Order order(job.graph);
    ASSERT_FALSE(order.cyclic());
    const auto count = static_cast<int64_t>(job.graph.nodes.size());
    std::map<std::string, std::vector<int64_t>> readers;
    std::map<std::string, int64_t> writer;
    for (int64_t i = 0; i < 2 * count; ++i) {
      const Node& node = job.graph.nodes[static_cast<size_t>(i % count)];
      const Uses uses = UsesOf(job.graph, node);
      for (const std::string& buffer : uses.reads) {
        if (writer.contains(buffer)) {
          ASSERT_TRUE(order.Before(writer[buffer], i))
              << NodeKindName(node.kind) << " " << i << " reads " << buffer << " too early";
        }
        readers[buffer].push_back(i);
      }
      for (const std::string& buffer : uses.writes) {
        for (const int64_t reader : readers[buffer]) {
          if (reader == i) continue;
          ASSERT_TRUE(order.Before(reader, i))
              << NodeKindName(node.kind) << " " << i << " overwrites " << buffer << " before node "
              << reader << " has read it";
        }
        readers[buffer].clear();
        writer[buffer] = i;
      }
    }
  });
}

// Goal: what is read is the step's version, and a unit is updated only after its last use in the
// step.
TEST_F(GraphTest, LoadsWaitForUpdatesOfTheStepBeforeAndUpdatesForTheLastUse) {
  ForJobs([](const TestJob& job) {
    const SharedLayout& layout = *job.layout;
    const Order order(job.graph);
    const auto count = static_cast<int64_t>(job.graph.nodes.size());
    std::map<int64_t, int64_t> updates;
    for (int64_t i = 0; i < count; ++i) {
      const Node& node = job.graph.nodes[static_cast<size_t>(i)];
      if (node.kind != NodeKind::kUpdate) continue;
      ASSERT_TRUE(updates.emplace(node.chunk, i).second) << "a chunk is updated twice";
      ASSERT_EQ(node.owner_rank, layout.chunks()[static_cast<size_t>(node.chunk)].owner_rank);
    }
    ASSERT_EQ(updates.size(), layout.chunks().size());
    const bool in_place = layout.rank_count() == 1;
    for (int64_t i = 0; i < count; ++i) {
      const Node& node = job.graph.nodes[static_cast<size_t>(i)];
      std::set<int64_t> units;
      if (node.kind == NodeKind::kGatherRows || node.kind == NodeKind::kLoadUnit)
        units = {node.unit};
      if (UsesWeights(node.kind) && in_place) {
        for (const ParameterUnit& unit : layout.units()) {
          const bool of_node =
              unit.index == node.unit || (unit.layer == node.layer && node.layer >= 0) ||
              (unit.kind == UnitKind::kEmbedding && node.layer < 0 && job.model.tied_embedding);
          const bool mixer_only = node.kind == NodeKind::kForwardMixer ||
                                  node.kind == NodeKind::kReplayMixer ||
                                  node.kind == NodeKind::kBackwardMixer;
          if (of_node && layout.resident(unit.index) &&
              !(mixer_only && unit.kind == UnitKind::kExperts)) {
            units.insert(unit.index);
          }
        }
      }
      for (const int64_t unit : units) {
        for (int64_t c = layout.first_chunk(unit); c < layout.first_chunk(unit + 1); ++c) {
          ASSERT_TRUE(order.Before(updates.at(c), count + i))
              << NodeKindName(node.kind) << " of unit " << unit << " does not wait for chunk " << c;
          ASSERT_TRUE(order.Before(i, updates.at(c))) << "chunk " << c << " is updated before "
                                                      << NodeKindName(node.kind) << " has used it";
        }
      }
    }
  });
}

// Goal: overlapped updates wait for their gradient and the loss; deferred ones for every gradient
// and the clip factor.
TEST_F(GraphTest, UpdatesWaitForTheirGate) {
  ForJobs([](const TestJob& job) {
    const Order order(job.graph);
    const bool deferred = job.plan.update_mode() == v1::UPDATE_MODE_DEFERRED;
    std::map<int64_t, int64_t> stores_of_chunk;
    const auto count = static_cast<int64_t>(job.graph.nodes.size());
    for (int64_t u = 0; u < count; ++u) {
      const Node& update = job.graph.nodes[static_cast<size_t>(u)];
      if (update.kind != NodeKind::kUpdate) continue;
      for (int64_t i = 0; i < count; ++i) {
        const Node& node = job.graph.nodes[static_cast<size_t>(i)];
        const bool gradient = node.kind == NodeKind::kStoreGradient ||
                              node.kind == NodeKind::kStoreRows || node.kind == NodeKind::kNorm;
        const bool its_own =
            gradient && (node.chunk == update.chunk ||
                         (node.kind == NodeKind::kStoreRows && node.unit == update.unit));
        const bool gate = deferred ? gradient || node.kind == NodeKind::kClip
                                   : its_own || node.kind == NodeKind::kHead;
        if (gate) {
          ASSERT_TRUE(order.Before(i, u))
              << NodeKindName(node.kind) << " of chunk " << update.chunk;
        }
        if (its_own && node.kind != NodeKind::kNorm) ++stores_of_chunk[update.chunk];
      }
    }
    for (const Chunk& chunk : job.layout->chunks()) {
      const bool rows = job.layout->gradient_by_row(chunk.unit);
      ASSERT_EQ(stores_of_chunk[chunk.index], rows ? 1 : job.plan.accumulation());
    }
  });
}

// Goal: a backlog slot is written again only after the update of the chunk that was in it.
TEST_F(GraphTest, BacklogSlotsAreBuffersToo) {
  int64_t edges = 0;
  ForJobs([&](const TestJob& job) {
    const SharedLayout& layout = *job.layout;
    if (layout.ring_chunks_per_step() == 0) return;
    const Order order(job.graph);
    const auto count = static_cast<int64_t>(job.graph.nodes.size());
    std::map<int64_t, int64_t> stores, updates;  // By FIFO number, over two steps.
    for (int64_t i = 0; i < 2 * count; ++i) {
      const Node& node = job.graph.nodes[static_cast<size_t>(i % count)];
      if (node.chunk < 0) continue;
      const int64_t sequence = layout.ring_sequence(node.chunk, i / count);
      if (sequence < 0) continue;
      if (node.kind == NodeKind::kStoreGradient) stores[sequence] = i;
      if (node.kind == NodeKind::kUpdate) updates[sequence] = i;
    }
    for (const auto& [sequence, store] : stores) {
      const auto occupant = updates.find(sequence - layout.ring_slot_count());
      if (occupant == updates.end()) continue;
      ++edges;
      ASSERT_TRUE(order.Before(occupant->second, store)) << "slot of chunk number " << sequence;
    }
  });
  EXPECT_GT(edges, 100);
}

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
    const int64_t reduced_bytes = job.plan.reduction() == v1::GRADIENT_REDUCTION_DEVICE_FLOAT32 ? 4 : 2;
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
      const int64_t gradients =
          a * unit.elements / (reduces ? ranks : 1) * layout.gradient_bytes();
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
        const bool shards = !resident && !in_place &&
                            job.plan.units(static_cast<int>(unit.index)).delivery() ==
                                v1::PARAMETER_DELIVERY_SHARD;
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
        const int64_t per_element = 24 + (rows ? 0 : layout.gradient_bytes() * (reduces ? 1 : ranks));
        EXPECT_EQ(node.bytes,
                  layout.chunks()[static_cast<size_t>(node.chunk)].elements * per_element);
      } else if (node.bytes > 0) {
        actual[node.resource] += node.bytes;
      }
    }
    EXPECT_EQ(actual, expected);
  });
}

// Goal: every rank issues its collectives in one order, and none of a layer's gradients stands before the weights of the
// layer below, which would wait for this layer's backward (engine rules, section 10).
TEST_F(GraphTest, WeightsFromOtherRanksAreFetchedBeforeGradientsOfTheLayerAbove) {
  int64_t fetched_ahead = 0;
  ForJobs([&](const TestJob& job) {
    if (job.plan.window_count() < 2 || job.plan.accumulation() > 1) return;
    std::map<int64_t, int64_t> reduced_layer;  // By layer: its first gradient in the order of collectives.
    int64_t place = 0;
    bool backward = false;
    for (const Node& node : job.graph.nodes) {
      if (node.kind == NodeKind::kHead) backward = true;
      if (!backward || node.resource != Resource::kCollective) continue;
      ++place;
      const int64_t layer = job.layout->units()[static_cast<size_t>(node.unit)].layer;
      if (node.kind == NodeKind::kReduceGradient || node.kind == NodeKind::kStoreGradient) {
        reduced_layer.try_emplace(layer, place);
      } else if (const auto above = reduced_layer.find(layer + 1); above != reduced_layer.end()) {
        FAIL() << "layer " << layer << " at " << place << ", gradients above at " << above->second;
      } else {
        ++fetched_ahead;
      }
    }
  }, {.max_layers = 6});
  EXPECT_GT(fetched_ahead, 0);
}

// Goal: evaluation reads the same units through the same windows, and stores, keeps and updates
// nothing.
TEST_F(GraphTest, EvaluationPublishesNothing) {
  ForJobs([](const TestJob& job) {
    const StepGraph graph = BuildEvaluationGraph(
        {.model = &job.model, .plan = &job.plan, .layout = job.layout.get(), .batch = job.batch});
    const Order order(graph);
    ASSERT_FALSE(order.cyclic());
    const std::set<NodeKind> allowed = {NodeKind::kGatherRows, NodeKind::kLoadUnit,
                                        NodeKind::kGatherUnit,
                                        NodeKind::kForwardMixer, NodeKind::kForwardMixture,
                                        NodeKind::kEvaluationHead};
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
