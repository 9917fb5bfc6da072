// Where every shared byte lies: properties over random models and plans (engine rules, sections 1,
// 3 and 6).

#include "runtime/memory/shm_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/graph/engine_testing.h"

namespace oom::testing {
namespace {

void ForJobs(const std::function<void(const TestJob&)>& check) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    const auto job = RandomJob(seed, {.tied = seed % 3 == 0});
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + job->plan.ShortDebugString());
    check(*job);
    if (::testing::Test::HasFailure()) return;
  }
}

// Every region that somebody may hold at once, named.
std::vector<std::pair<std::string, Region>> Regions(const TestJob& job) {
  const SharedLayout& layout = *job.layout;
  std::vector<std::pair<std::string, Region>> regions;
  std::set<int64_t> slots;
  for (const Chunk& chunk : layout.chunks()) {
    const std::string name = "chunk " + std::to_string(chunk.index);
    regions.emplace_back("weights of " + name, layout.weights(chunk.index));
    regions.emplace_back("rest of " + name, layout.rest(chunk.index));
    if (chunk.owner_rank >= 0)
      regions.emplace_back("snapshot of " + name, layout.snapshot(chunk.index));
    if (layout.gradient_by_row(chunk.unit)) continue;
    const int64_t sequence = layout.ring_sequence(chunk.index, 0);
    // Chunks that share a slot are not there at once.
    if (sequence >= 0 && !slots.insert(sequence % layout.ring_slot_count()).second) continue;
    for (int rank = 0; rank < layout.rank_count(); ++rank) {
      regions.emplace_back("gradient of " + name, layout.gradient_of_rank(chunk.index, rank, 0));
    }
  }
  for (int rank = 0; rank < layout.rank_count(); ++rank) {
    regions.emplace_back("rows", layout.embedding_rows(rank).region);
    for (int64_t layer = 0; layer < job.model.layer_count(); ++layer) {
      const Region boundary = layout.boundary(rank, layer);
      const v1::LayerPlan& plan = job.plan.layers(static_cast<int>(layer));
      const bool on_host = plan.boundary() == v1::BOUNDARY_HOME_HOST && !plan.retain_mixer();
      EXPECT_EQ(boundary.bytes, on_host ? job.batch.micro_batch_tokens() * job.model.hidden_size *
                                              layout.activation_bytes()
                                        : 0);
      if (on_host) regions.emplace_back("boundary", boundary);
    }
  }
  return regions;
}

TEST(SharedLayout, RegionsOfAPoolNeverOverlapAndStayInside) {
  ForJobs([](const TestJob& job) {
    auto regions = Regions(job);
    std::sort(regions.begin(), regions.end(), [](const auto& a, const auto& b) {
      return std::tie(a.second.pool, a.second.offset_bytes) <
             std::tie(b.second.pool, b.second.offset_bytes);
    });
    for (size_t i = 0; i < regions.size(); ++i) {
      const Region& region = regions[i].second;
      ASSERT_GT(region.bytes, 0) << regions[i].first;
      ASSERT_GE(region.pool, 0);
      ASSERT_LT(region.pool, static_cast<int>(job.layout->pools().size()));
      ASSERT_GE(region.offset_bytes, 0);
      ASSERT_LE(region.offset_bytes + region.bytes,
                job.layout->pools()[static_cast<size_t>(region.pool)].bytes)
          << regions[i].first;
      if (i == 0 || regions[i - 1].second.pool != region.pool) continue;
      ASSERT_LE(regions[i - 1].second.offset_bytes + regions[i - 1].second.bytes,
                region.offset_bytes)
          << regions[i - 1].first << " overlaps " << regions[i].first;
    }
    std::set<std::string> names;
    for (const PoolSpec& pool : job.layout->pools()) {
      ASSERT_TRUE(names.insert(pool.name).second);
      ASSERT_EQ(pool.bytes % 4096, 0);
    }
  });
}

TEST(SharedLayout, UnitsAreCutIntoChunksThatDivideByTheRanks) {
  ForJobs([](const TestJob& job) {
    const SharedLayout& layout = *job.layout;
    const int64_t granule = layout.rank_count() * kBlockElements;
    int64_t blocks = 0;
    for (const ParameterUnit& unit : layout.units()) {
      ASSERT_EQ(unit.elements % granule, 0);
      int64_t tensor_end = 0;
      for (const TensorSpec& tensor : unit.tensors) {
        ASSERT_EQ(tensor.offset_elements % kBlockElements, 0) << tensor.name;
        ASSERT_GE(tensor.offset_elements, tensor_end) << tensor.name;
        tensor_end = tensor.offset_elements + tensor.elements;
      }
      ASSERT_LE(tensor_end, unit.elements);
      int64_t element = 0, within = 0;
      for (int64_t c = layout.first_chunk(unit.index); c < layout.first_chunk(unit.index + 1);
           ++c, ++within) {
        const Chunk& chunk = layout.chunks()[static_cast<size_t>(c)];
        ASSERT_EQ(chunk.index, c);
        ASSERT_EQ(chunk.unit, unit.index);
        ASSERT_EQ(chunk.first_element, element);
        ASSERT_EQ(chunk.elements % granule, 0);
        ASSERT_EQ(chunk.first_block, blocks);
        ASSERT_LE(chunk.elements * layout.weight_bytes(),
                  std::max(job.plan.chunk_bytes(), granule * layout.weight_bytes()));
        const bool resident =
            job.plan.units(static_cast<int>(unit.index)).home() == v1::STATE_HOME_RESIDENT;
        ASSERT_EQ(chunk.owner_rank, resident ? within % layout.rank_count() : -1);
        ASSERT_EQ(layout.resident(unit.index), resident);
        element += chunk.elements;
        blocks += chunk.elements / kBlockElements;
      }
      ASSERT_EQ(element, unit.elements);
    }
    ASSERT_EQ(layout.control_page().block_count, blocks);
    // A single rank has nobody to tell.
    ASSERT_EQ(layout.control_page().expert_count,
              layout.rank_count() > 1 ? job.model.expert_count : 0);
    ASSERT_EQ(layout.control_page().chunk_count, static_cast<int64_t>(layout.chunks().size()));
  });
}

// The weights of a streamed unit, and of one that is resident on a single device, are one range:
// one copy delivers them.
TEST(SharedLayout, WeightsOfAUnitAreContiguous) {
  ForJobs([](const TestJob& job) {
    const SharedLayout& layout = *job.layout;
    for (const ParameterUnit& unit : layout.units()) {
      if (layout.resident(unit.index) && layout.rank_count() > 1) continue;
      const Region first = layout.weights(layout.first_chunk(unit.index));
      for (int64_t c = layout.first_chunk(unit.index); c < layout.first_chunk(unit.index + 1);
           ++c) {
        const Region region = layout.weights(c);
        const Chunk& chunk = layout.chunks()[static_cast<size_t>(c)];
        ASSERT_EQ(region.pool, first.pool);
        ASSERT_EQ(region.offset_bytes,
                  first.offset_bytes + chunk.first_element * layout.weight_bytes());
        ASSERT_EQ(region.bytes, chunk.elements * layout.weight_bytes());
        ASSERT_EQ(layout.rest(c).bytes,
                  chunk.elements / kBlockElements * layout.rest_block_bytes());
        ASSERT_EQ(region.offset_bytes % 4096, 0);
        ASSERT_EQ(layout.rest(c).offset_bytes % 4096, 0);
      }
    }
  });
}

// Goal: gradients of overlapped, streamed chunks pass one ring of slots in the order in which
// backward stores them; every other gradient has a place of its own for ever.
TEST(SharedLayout, RingNumbersFollowTheStoreOrder) {
  ForJobs([](const TestJob& job) {
    const SharedLayout& layout = *job.layout;
    const bool overlapped = job.plan.update_mode() == v1::UPDATE_MODE_OVERLAPPED;
    int64_t expected = 0;
    for (const Node& node : job.graph.nodes) {
      if (node.kind != NodeKind::kStoreGradient || node.micro_batch != 0) continue;
      const bool streamed = layout.chunks()[static_cast<size_t>(node.chunk)].owner_rank < 0;
      if (!overlapped || !streamed) {
        ASSERT_EQ(layout.ring_sequence(node.chunk, 3), -1);
        const Region now = layout.gradient(node.chunk, 0, 0);
        ASSERT_EQ(now.offset_bytes, layout.gradient(node.chunk, 0, 5).offset_bytes);
        continue;
      }
      for (const int64_t step : {int64_t{0}, int64_t{7}}) {
        ASSERT_EQ(layout.ring_sequence(node.chunk, step),
                  step * layout.ring_chunks_per_step() + expected);
      }
      ++expected;
    }
    ASSERT_EQ(expected, layout.ring_chunks_per_step());
    if (expected == 0) return;
    ASSERT_LE(layout.ring_slot_count(), expected);
    ASSERT_GE(layout.ring_slot_count(), std::min<int64_t>(expected, 4));
    // Two numbers share a place exactly if they are a whole number of rounds apart.
    std::map<int64_t, int64_t> slot_of_place;
    for (const Chunk& chunk : layout.chunks()) {
      for (int64_t step = 0; step < 3; ++step) {
        const int64_t sequence = layout.ring_sequence(chunk.index, step);
        if (sequence < 0) continue;
        const Region region = layout.gradient(chunk.index, 0, step);
        ASSERT_EQ(region.bytes, chunk.elements * layout.gradient_bytes());
        const auto [slot, is_new] =
            slot_of_place.emplace(region.offset_bytes, sequence % layout.ring_slot_count());
        ASSERT_EQ(slot->second, sequence % layout.ring_slot_count());
      }
    }
    ASSERT_LE(static_cast<int64_t>(slot_of_place.size()), layout.ring_slot_count());
  });
}

// A partial is stored in 2 bytes, or in 4 where it accumulates or the job is FP32.
TEST(SharedLayout, GradientPartialsHaveTheBytesOfTheRule) {
  ForJobs([](const TestJob& job) {
    const bool float32 = job.plan.precision() == v1::PRECISION_FLOAT32;
    const int ranks = job.layout->rank_count();
    const bool reduces = ranks > 1 && job.plan.reduction() != v1::GRADIENT_REDUCTION_HOST;
    ASSERT_EQ(job.layout->partial_count(), reduces ? 1 : ranks);
    for (const Chunk& chunk : job.layout->chunks()) {
      ASSERT_EQ(job.layout->gradient_by_row(chunk.unit), chunk.unit == 0 && !job.model.tied_embedding);
      if (job.layout->gradient_by_row(chunk.unit)) continue;
      const int64_t bytes = chunk.elements * job.layout->gradient_bytes();
      ASSERT_EQ(job.layout->gradient_of_rank(chunk.index, ranks - 1, 0).bytes,
                reduces ? bytes / ranks : bytes);
    }
    ASSERT_EQ(job.layout->gradient_bytes(), float32 || job.plan.accumulation() > 1 ? 4 : 2);
    ASSERT_EQ(job.layout->row_gradient_bytes(), float32 ? 4 : 2);
    for (int rank = 0; rank < job.layout->rank_count(); ++rank) {
      const SharedLayout::RowGradient rows = job.layout->embedding_rows(rank);
      ASSERT_EQ(rows.max_rows, std::min(job.model.vocabulary_size, job.batch.rank_tokens()));
      ASSERT_GE(rows.row_set_bytes, rows.kRowNumbersOffset + rows.max_rows * 4);
      ASSERT_EQ(rows.row_set_offset_bytes(3), rows.row_set_bytes);
      ASSERT_EQ(rows.row_set_offset_bytes(4), 0);
      ASSERT_EQ(rows.rows_offset_bytes, 2 * rows.row_set_bytes);
      const int64_t values =
          job.model.tied_embedding ? 0 : rows.max_rows * job.model.hidden_size;
      ASSERT_EQ(rows.region.bytes,
                rows.rows_offset_bytes + values * job.layout->row_gradient_bytes());
    }
  });
}

// Goal: the layout is a pure function: oomd, the job host and the workers compute the same one.
TEST(SharedLayout, TheSamePlanGivesTheSameLayout) {
  ForJobs([](const TestJob& job) {
    v1::Plan copy;
    ASSERT_TRUE(copy.ParseFromString(job.plan.SerializeAsString()));
    const SharedLayout again = SharedLayout::Build(job.model, copy, job.batch);
    ASSERT_EQ(again.pools().size(), job.layout->pools().size());
    for (size_t i = 0; i < again.pools().size(); ++i) {
      ASSERT_EQ(again.pools()[i].name, job.layout->pools()[i].name);
      ASSERT_EQ(again.pools()[i].bytes, job.layout->pools()[i].bytes);
      ASSERT_EQ(again.pools()[i].numa_node, job.layout->pools()[i].numa_node);
    }
    for (const Chunk& chunk : again.chunks()) {
      ASSERT_EQ(again.weights(chunk.index).offset_bytes,
                job.layout->weights(chunk.index).offset_bytes);
      ASSERT_EQ(again.rest(chunk.index).pool, job.layout->rest(chunk.index).pool);
    }
  });
}

// Goal: a streamed parameter costs 12 bytes, padding included at most 0.5% more, on models of real
// proportions.
TEST(SharedLayout, AStreamedParameterCostsTwelveBytes) {
  for (const bool float32 : {false, true}) {
    for (const int ranks : {1, 2, 4}) {
      ModelDescription model{.hidden_size = 512,
                             .vocabulary_size = 32000,
                             .expert_count = 16,
                             .experts_per_token = 4,
                             .expert_width = 256,
                             .dense_width = 1536};
      const AttentionDescription attention = {.query_head_count = 8,
                                              .kv_head_count = 2,
                                              .head_size = 64,
                                              .query_key_norm = true,
                                              .rotary = {.size = 64, .pair_count = 32}};
      model.layers.assign(6, {.attention = attention});
      model.layers[0].mixture = MixtureKind::kDense;
      v1::Plan plan = PlainPlan(model, ranks);
      if (float32) plan.set_precision(v1::PRECISION_FLOAT32);
      plan.set_chunk_bytes(int64_t{4} << 20);
      const SharedLayout layout = SharedLayout::Build(
          model, plan, {.micro_batch_sequences = 1, .sequence_length = 64, .accumulation = 1});
      const int64_t parameters = ParameterCount(layout.units());
      ASSERT_GE(parameters, 50000000);
      int64_t bytes = 0;
      for (const PoolSpec& pool : layout.pools()) {
        if (pool.name.rfind("weights.", 0) == 0 || pool.name.rfind("rest.", 0) == 0)
          bytes += pool.bytes;
      }
      const double each = static_cast<double>(bytes) / static_cast<double>(parameters);
      EXPECT_GE(each, 12.0);
      EXPECT_LE(each, 12.06);
    }
  }
}

}  // namespace
}  // namespace oom::testing
