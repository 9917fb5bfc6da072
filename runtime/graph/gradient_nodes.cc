#include "runtime/graph/gradient_nodes.h"

#include <string>
#include <utility>

namespace oom {
namespace {

// Slices of gradients on their way from the devices' sum to where they are updated.
constexpr int64_t kReducedSlots = 4;

}  // namespace

void GradientNodes::BeginStep() {
  stores_.clear();
  landed_.clear();
  loss_node_ = -1;
  reduced_ = 0;
}

bool GradientNodes::UsedInPlace(int64_t unit) const {
  return layout_.resident(unit) && layout_.rank_count() == 1;
}

int64_t GradientNodes::WeightsInPlace(int64_t unit) {
  return assembly_.BufferIndex("resident." + layout_.units()[unit].name, Space::kDevice, 0);
}

void GradientNodes::AfterUpdatesOf(int64_t unit) {
  for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
    const auto update = updates_.find(c);
    if (update != updates_.end() && update->second < assembly_.step_begin()) {
      assembly_.After(update->second);
    }
  }
}

void GradientNodes::Store(int64_t unit, int64_t gradient) {
  const bool resident = layout_.resident(unit);
  const Resource resource = !resident                   ? Resource::kDeviceToHost
                            : layout_.rank_count() == 1 ? Resource::kDeviceUpdate
                                                        : Resource::kCollective;
  for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
    const int64_t from = layout_.reduces_on_devices() ? Reduce(unit, c, gradient) : gradient;
    Node& store = Add(NodeKind::kStoreGradient, resource);
    store.unit = unit;
    store.chunk = c;
    store.buffer = from;
    store.bytes = resource == Resource::kDeviceUpdate ? 0 : StoredBytes(c);
    assembly_.Read(from);
    Landed(c);
  }
  Norms(unit);
}

void GradientNodes::StoreRows(int64_t embedding, int64_t rows) {
  Node& store = Add(NodeKind::kStoreRows, layout_.resident(embedding) ? Resource::kDeviceUpdate
                                                                      : Resource::kDeviceToHost);
  store.unit = embedding;
  assembly_.Read(rows);
  for (int64_t c = layout_.first_chunk(embedding); c < layout_.first_chunk(embedding + 1); ++c) {
    Landed(c);
  }
  Norms(embedding);
}

// What a rank stores of a chunk's gradient: its partial, or its slice of the sum.
int64_t GradientNodes::StoredBytes(int64_t c) const {
  const int64_t bytes = layout_.chunks()[c].elements * layout_.gradient_bytes();
  return layout_.reduces_on_devices() ? bytes / layout_.rank_count() : bytes;
}

// Sums the ranks' partials, each rank its slice; returns the buffer that holds it.
int64_t GradientNodes::Reduce(int64_t unit, int64_t c, int64_t gradient) {
  const int64_t value_bytes = layout_.reduction() == v1::GRADIENT_REDUCTION_DEVICE_FLOAT32 ? 4 : 2;
  const int64_t slice_bytes = layout_.chunks()[c].elements / layout_.rank_count() * value_bytes;
  const int64_t slot =
      assembly_.BufferIndex("gradient.reduced." + std::to_string(reduced_++ % kReducedSlots),
                            Space::kDevice, slice_bytes);
  Node& reduce = Add(NodeKind::kReduceGradient, Resource::kCollective);
  reduce.unit = unit;
  reduce.chunk = c;
  reduce.buffer = slot;
  reduce.gradient = gradient;
  // From each of the others.
  reduce.bytes = slice_bytes * (layout_.rank_count() - 1);
  assembly_.Read(gradient);
  assembly_.Write(slot);
  return slot;
}

// The last node completes the gradient of chunk `c` on this rank.
void GradientNodes::Landed(int64_t c) {
  stores_.push_back(assembly_.last());
  landed_[c] = assembly_.last();
}

// The owner of a resident chunk sums the ranks' partials once the last micro-batch is in.
void GradientNodes::Norms(int64_t unit) {
  if (!layout_.resident(unit) || assembly_.micro_batch() + 1 < plan_.accumulation()) return;
  for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
    Node& norm = Add(NodeKind::kNorm, Resource::kDeviceUpdate);
    norm.unit = unit;
    norm.chunk = c;
    norm.owner_rank = layout_.chunks()[c].owner_rank;
    assembly_.After(landed_.at(c));
    Landed(c);
  }
}

void GradientNodes::Updates() {
  const bool deferred = plan_.update_mode() == v1::UPDATE_MODE_DEFERRED;
  int64_t gate = loss_node_;
  if (deferred) {
    Add(NodeKind::kClip, Resource::kHostOptimizer);
    for (const int64_t store : stores_) assembly_.After(store);
    gate = assembly_.last();
  }
  std::map<int64_t, int64_t> new_updates;
  for (const Chunk& chunk : layout_.chunks()) {
    Node& update = Add(NodeKind::kUpdate,
                       chunk.owner_rank < 0 ? Resource::kHostOptimizer : Resource::kDeviceUpdate);
    update.unit = chunk.unit;
    update.chunk = chunk.index;
    update.owner_rank = chunk.owner_rank;
    update.bytes = chunk.elements * layout_.update_traffic_bytes(chunk.unit);
    assembly_.After(landed_.at(chunk.index));
    assembly_.After(gate);
    if (UsedInPlace(chunk.unit)) assembly_.Write(WeightsInPlace(chunk.unit));
    new_updates[chunk.index] = assembly_.last();
  }
  WaitForBacklogSlots(new_updates);
  updates_ = std::move(new_updates);
}

// A backlog slot is a buffer too: its next writer waits for the update that reads it, in this step
// or the one before. Executors keep these edges by the word `backlog_freed`.
void GradientNodes::WaitForBacklogSlots(const std::map<int64_t, int64_t>& new_updates) {
  const int64_t slots = layout_.ring_slot_count();
  const int64_t in_step = layout_.ring_chunks_per_step();
  std::map<int64_t, int64_t> chunk_at;  // By position in the step's store order.
  for (const Chunk& chunk : layout_.chunks()) {
    const int64_t position = layout_.ring_sequence(chunk.index, 0);
    if (position >= 0) chunk_at[position] = chunk.index;
  }
  for (const auto& [position, chunk] : chunk_at) {
    const int64_t before = position - slots;
    const auto& updates = before >= 0 ? new_updates : updates_;
    const auto reader = updates.find(chunk_at.at(before >= 0 ? before : before + in_step));
    if (reader == updates.end()) continue;
    assembly_.After(landed_.at(chunk), reader->second);
  }
}

}  // namespace oom
