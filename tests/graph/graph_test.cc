// The order of built step graphs over random models and plans (engine rules, section 4 and 13): who
// waits for whom. What a node reads and writes is taken from what its kind means, not from the
// lists that the builder made edges of.

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

}  // namespace
}  // namespace oom::testing
