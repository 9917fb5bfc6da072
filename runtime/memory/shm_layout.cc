#include "runtime/memory/shm_layout.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

// Regions start at page boundaries of DMA and of first touch.
constexpr int64_t kRegionAlignment = 4096;
constexpr int64_t kMinimumRingSlots = 4;
// Exchanges of which a rank's part may be there at once.
constexpr int64_t kExchangeSlots = 2;

}  // namespace

// Gathers regions by pool name, so that a pool's bytes are known when the last region is placed.
class SharedLayoutBuilder {
 public:
  SharedLayoutBuilder(const ModelDescription& model, const v1::Plan& plan, const BatchShape& batch)
      : model_(model), plan_(plan), batch_(batch) {}

  SharedLayout Build() {
    layout_.rank_count_ = plan_.rank_count();
    layout_.float32_ = plan_.precision() == v1::PRECISION_FLOAT32;
    layout_.tied_embedding_ = model_.tied_embedding;
    layout_.reduction_ = plan_.reduction();
    layout_.expert_count_ = model_.expert_count;
    layout_.gradient_bytes_ = layout_.float32_ || batch_.accumulation > 1 ? 4 : 2;
    layout_.units_ = BuildUnits(model_, plan_.rank_count());
    OOM_CHECK(static_cast<int>(layout_.units_.size()) == plan_.units_size());
    CutChunks();
    PlaceState();
    PlaceGradients();
    PlaceActivations();
    PlaceExchanges();
    for (const ParameterUnit& unit : layout_.units_) {
      layout_.exchanges_between_ranks_ =
          layout_.exchanges_between_ranks_ ||
          (layout_.rank_count_ > 1 && (layout_.reduces_on_devices() || layout_.sharded(unit.index) ||
                                       layout_.resident(unit.index)));
    }
    return std::move(layout_);
  }

 private:
  Region Place(const std::string& kind, int index, int numa_node, int64_t bytes) {
    const std::string name = kind + "." + std::to_string(index);
    auto [entry, is_new] = pool_index_.try_emplace(name, static_cast<int>(layout_.pools_.size()));
    if (is_new) {
      layout_.pools_.push_back({.name = name,
                                .numa_node = numa_node,
                                .on_gpu = plan_.cuda_devices() && kind == "device"});
    }
    PoolSpec& pool = layout_.pools_[entry->second];
    const Region region{.pool = entry->second, .offset_bytes = pool.bytes, .bytes = bytes};
    pool.bytes += RoundUp(bytes, kRegionAlignment);
    return region;
  }

  int RankNode(int rank) const {
    return rank < plan_.rank_numa_node_size() ? plan_.rank_numa_node(rank) : 0;
  }

  void CutChunks() {
    const int64_t granule = layout_.rank_count_ * kBlockElements;
    const int64_t wanted = plan_.chunk_bytes() / layout_.weight_bytes() / granule * granule;
    const int64_t chunk_elements = std::max(granule, wanted);
    for (const ParameterUnit& unit : layout_.units_) {
      layout_.first_chunk_.push_back(static_cast<int64_t>(layout_.chunks_.size()));
      const v1::UnitPlan& unit_plan = plan_.units(static_cast<int>(unit.index));
      const bool resident = unit_plan.home() == v1::STATE_HOME_RESIDENT;
      // An embedding that the head does not have comes by row.
      layout_.sharded_.push_back(!resident && layout_.rank_count_ > 1 &&
                                 !layout_.gradient_by_row(unit.index) &&
                                 unit_plan.delivery() == v1::PARAMETER_DELIVERY_SHARD);
      int64_t within_unit = 0;
      for (int64_t first = 0; first < unit.elements; first += chunk_elements, ++within_unit) {
        const int64_t elements = std::min(chunk_elements, unit.elements - first);
        layout_.chunks_.push_back({
            .index = static_cast<int64_t>(layout_.chunks_.size()),
            .unit = unit.index,
            .first_element = first,
            .elements = elements,
            .first_block = layout_.block_count_,
            .owner_rank = resident ? static_cast<int>(within_unit % layout_.rank_count_) : -1,
            .numa_node = unit_plan.numa_node(),
        });
        layout_.block_count_ += elements / kBlockElements;
      }
    }
    layout_.first_chunk_.push_back(static_cast<int64_t>(layout_.chunks_.size()));
  }

  // The weights that one place holds of a unit are contiguous (chunks follow each other), so that one copy
  // delivers them, and a unit that is resident on a single device is used where it lies.
  void PlaceState() {
    layout_.weights_.resize(layout_.chunks_.size());
    layout_.rest_.resize(layout_.chunks_.size());
    layout_.snapshots_.resize(layout_.chunks_.size());
    for (const ParameterUnit& unit : layout_.units_) {
      const int64_t begin = layout_.first_chunk_[unit.index];
      const int64_t end = layout_.first_chunk_[unit.index + 1];
      for (int64_t c = begin; c < end; ++c) {
        const Chunk& chunk = layout_.chunks_[c];
        const int64_t bytes = chunk.elements * layout_.weight_bytes();
        layout_.weights_[c] =
            chunk.owner_rank < 0
                ? Place("weights", chunk.numa_node, chunk.numa_node, bytes)
                : Place("device", chunk.owner_rank, RankNode(chunk.owner_rank), bytes);
      }
      for (int64_t c = begin; c < end; ++c) {
        const Chunk& chunk = layout_.chunks_[c];
        const int64_t bytes = chunk.elements / kBlockElements * layout_.rest_block_bytes();
        if (chunk.owner_rank < 0) {
          layout_.rest_[c] = Place("rest", chunk.numa_node, chunk.numa_node, bytes);
        } else {
          const int rank = chunk.owner_rank;
          layout_.rest_[c] = Place("device", rank, RankNode(rank), bytes);
          layout_.snapshots_[c] =
              Place("snapshot", rank, RankNode(rank), layout_.weights_[c].bytes + bytes);
        }
      }
    }
  }

  void PlaceGradients() {
    const bool overlapped = plan_.update_mode() == v1::UPDATE_MODE_OVERLAPPED;
    OOM_CHECK(!overlapped || batch_.accumulation == 1);
    layout_.gradients_.resize(layout_.chunks_.size());
    layout_.ring_position_.assign(layout_.chunks_.size(), -1);
    int64_t largest_elements = 0;
    // The order in which backward produces gradients: the head first, the lowest layer last.
    for (auto unit = layout_.units_.rbegin(); unit != layout_.units_.rend(); ++unit) {
      if (layout_.gradient_by_row(unit->index)) continue;
      for (int64_t c = layout_.first_chunk_[unit->index]; c < layout_.first_chunk_[unit->index + 1];
           ++c) {
        const Chunk& chunk = layout_.chunks_[c];
        const int64_t bytes = chunk.elements * layout_.gradient_bytes_ * layout_.partial_count();
        if (chunk.owner_rank >= 0) {
          layout_.gradients_[c] =
              Place("device", chunk.owner_rank, RankNode(chunk.owner_rank), bytes);
        } else if (overlapped) {
          layout_.ring_position_[c] = layout_.ring_chunks_per_step_++;
          largest_elements = std::max(largest_elements, chunk.elements);
        } else {
          layout_.gradients_[c] = Place("gradients", chunk.numa_node, chunk.numa_node, bytes);
        }
      }
    }
    if (layout_.ring_chunks_per_step_ == 0) return;
    layout_.ring_slot_bytes_ = largest_elements * layout_.gradient_bytes_;
    layout_.ring_slot_count_ =
        std::min(layout_.ring_chunks_per_step_,
                 std::max(kMinimumRingSlots, plan_.backlog_bytes() / layout_.ring_slot_bytes_));
    layout_.ring_ = Place("gradients", 0, 0,
                          layout_.ring_slot_count_ * layout_.ring_slot_bytes_ *
                              layout_.partial_count());
  }

  void PlaceActivations() {
    for (int rank = 0; rank < layout_.rank_count_; ++rank) {
      SharedLayout::RowGradient rows;
      rows.max_rows = std::min(model_.vocabulary_size, batch_.rank_tokens());
      rows.row_set_bytes = RoundUp(rows.kRowNumbersOffset + rows.max_rows * 4, 64);
      rows.rows_offset_bytes = 2 * rows.row_set_bytes;
      const int64_t values = layout_.tied_embedding_ ? 0 : rows.max_rows * model_.hidden_size;
      rows.region = Place("activations", rank, RankNode(rank),
                          rows.rows_offset_bytes + values * layout_.row_gradient_bytes());
      layout_.embedding_rows_.push_back(rows);
      std::vector<Region> boundaries;
      for (int layer = 0; layer < plan_.layers_size(); ++layer) {
        if (plan_.layers(layer).boundary() == v1::BOUNDARY_HOME_HOST &&
            !plan_.layers(layer).retain_mixer()) {
          boundaries.push_back(Place("activations", rank, RankNode(rank),
                                     batch_.micro_batch_tokens() * model_.hidden_size *
                                         layout_.activation_bytes()));
        } else {
          boundaries.push_back({});
        }
      }
      layout_.boundaries_.push_back(std::move(boundaries));
    }
  }

  void PlaceExchanges() {
    if (!layout_.reduces_on_devices() || plan_.cuda_devices()) return;
    int64_t largest_elements = 0;
    for (const Chunk& chunk : layout_.chunks_) {
      largest_elements = std::max(largest_elements, chunk.elements);
    }
    for (int rank = 0; rank < layout_.rank_count_; ++rank) {
      layout_.exchanges_.push_back(Place("exchange", rank, RankNode(rank),
                                         kExchangeSlots * largest_elements *
                                             static_cast<int64_t>(sizeof(float))));
    }
  }

  const ModelDescription& model_;
  const v1::Plan& plan_;
  const BatchShape batch_;
  SharedLayout layout_;
  std::map<std::string, int> pool_index_;
};

SharedLayout SharedLayout::Build(const ModelDescription& model, const v1::Plan& plan,
                                 const BatchShape& batch) {
  return SharedLayoutBuilder(model, plan, batch).Build();
}

ControlPage::Layout SharedLayout::control_page() const {
  return {.rank_count = rank_count_,
          .chunk_count = static_cast<int64_t>(chunks_.size()),
          .block_count = block_count_,
          .expert_count = rank_count_ > 1 ? expert_count_ : 0};
}

Region SharedLayout::gradient(int64_t chunk, int partial, int64_t step) const {
  const int64_t bytes = chunks_[chunk].elements * gradient_bytes_;
  const int64_t sequence = ring_sequence(chunk, step);
  if (sequence < 0) {
    Region region = gradients_[chunk];
    OOM_CHECK(region.pool >= 0);
    region.offset_bytes += partial * bytes;
    region.bytes = bytes;
    return region;
  }
  const int64_t slot = sequence % ring_slot_count_;
  return {.pool = ring_.pool,
          .offset_bytes = ring_.offset_bytes + (slot * partial_count() + partial) * ring_slot_bytes_,
          .bytes = bytes};
}

Region SharedLayout::gradient_of_rank(int64_t chunk, int rank, int64_t step) const {
  if (!reduces_on_devices()) return gradient(chunk, rank, step);
  Region slice = gradient(chunk, 0, step);
  slice.bytes /= rank_count_;
  slice.offset_bytes += rank * slice.bytes;
  return slice;
}

Region SharedLayout::exchange(int rank, int64_t sequence) const {
  Region slot = exchanges_[rank];
  slot.bytes /= kExchangeSlots;
  slot.offset_bytes += sequence % kExchangeSlots * slot.bytes;
  return slot;
}

std::span<const int32_t> RowSet(const SharedLayout& layout, const PoolMap& pools, int rank,
                                int64_t step) {
  const SharedLayout::RowGradient rows = layout.embedding_rows(rank);
  const std::byte* set = pools.At(rows.region) + rows.row_set_offset_bytes(step);
  int64_t count = 0;
  std::memcpy(&count, set, sizeof(count));
  return {reinterpret_cast<const int32_t*>(set + rows.kRowNumbersOffset),
          static_cast<size_t>(count)};
}

int64_t SharedLayout::update_traffic_bytes(int64_t unit) const {
  constexpr int64_t kStateBytes = 12;
  return 2 * kStateBytes + (gradient_by_row(unit) ? 0 : gradient_bytes_ * partial_count());
}

int64_t SharedLayout::ring_sequence(int64_t chunk, int64_t step) const {
  if (ring_position_[chunk] < 0) return -1;
  return step * ring_chunks_per_step_ + ring_position_[chunk];
}

}  // namespace oom
