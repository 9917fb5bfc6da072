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
  landed_ = NoNodes();
  loss_node_ = -1;
  reduced_ = 0;
}

int64_t GradientNodes::WeightsInPlace(int64_t unit) {
  return assembly_.BufferIndex("resident." + layout_.units()[unit].name, Space::kDevice, 0);
}

void GradientNodes::AfterUpdatesOf(int64_t unit) {
  for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
    const int64_t update = updates_[static_cast<size_t>(c)];
    if (update < assembly_.step_begin()) assembly_.After(update);
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
  landed_[static_cast<size_t>(c)] = assembly_.last();
}

// The owner of a resident chunk sums the ranks' partials once the last micro-batch is in.
void GradientNodes::Norms(int64_t unit) {
  if (!layout_.resident(unit) || assembly_.micro_batch() + 1 < plan_.accumulation()) return;
  for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
    Node& norm = Add(NodeKind::kNorm, Resource::kDeviceUpdate);
    norm.unit = unit;
    norm.chunk = c;
    norm.owner_rank = layout_.chunks()[c].owner_rank;
    assembly_.After(landed_[static_cast<size_t>(c)]);
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
  std::vector<int64_t> new_updates = NoNodes();
  for (const Chunk& chunk : layout_.chunks()) {
    Node& update = Add(NodeKind::kUpdate,
                       chunk.owner_rank < 0 ? Resource::kHostOptimizer : Resource::kDeviceUpdate);
    update.unit = chunk.unit;
    update.chunk = chunk.index;
    update.owner_rank = chunk.owner_rank;
    update.bytes = chunk.elements * layout_.update_traffic_bytes(chunk.unit);
    assembly_.After(landed_[static_cast<size_t>(chunk.index)]);
    assembly_.After(gate);
    if (layout_.used_in_place(chunk.unit)) assembly_.Write(WeightsInPlace(chunk.unit));
    new_updates[static_cast<size_t>(chunk.index)] = assembly_.last();
  }
  WaitForBacklogSlots(new_updates);
  updates_ = std::move(new_updates);
}

// A backlog slot is a buffer too: its next writer waits for the update that reads it, in this step
// or the one before. Executors keep these edges by the word `backlog_freed`.
void GradientNodes::WaitForBacklogSlots(const std::vector<int64_t>& new_updates) {
  const int64_t slots = layout_.ring_slot_count();
  const int64_t in_step = layout_.ring_chunks_per_step();
  std::vector<int64_t> chunk_at(static_cast<size_t>(in_step),
                                -1);  // By position in the step's store order.
  for (const Chunk& chunk : layout_.chunks()) {
    const int64_t position = layout_.ring_sequence(chunk.index, 0);
    if (position >= 0) chunk_at[static_cast<size_t>(position)] = chunk.index;
  }
  for (int64_t position = 0; position < in_step; ++position) {
    const int64_t before = position - slots;
    const std::vector<int64_t>& updates = before >= 0 ? new_updates : updates_;
    const int64_t holder = chunk_at[static_cast<size_t>(before >= 0 ? before : before + in_step)];
    const int64_t writer = landed_[static_cast<size_t>(chunk_at[static_cast<size_t>(position)])];
    assembly_.After(writer, updates[static_cast<size_t>(holder)]);
  }
}

}  // namespace oom
