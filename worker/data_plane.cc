#include "worker/data_plane.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "runtime/base/check.h"

namespace oom {

DataPlane::DataPlane(const Options& options)
    : options_(options), transfers_(static_cast<int64_t>(options.layout->units().size())) {}

Status DataPlane::Await(const SharedWord& word, int64_t target) const {
  switch (word.WaitAtLeast(static_cast<uint64_t>(target), options_.page->aborted(),
                           options_.wait)) {
    case WaitResult::kReached: return Status::Ok();
    case WaitResult::kAborted: return Status(Code::kAborted, "the attempt was aborted");
    case WaitResult::kTimeout: break;
  }
  return Status(Code::kDeadlineExceeded, "a shared word did not come").WithReason("WORKER_HUNG");
}

Status DataPlane::AwaitVersion(int64_t chunk, int64_t step) const {
  return Await(options_.page->version(chunk), step);
}

Status DataPlane::AwaitSlot(int64_t chunk, int64_t step) const {
  const int64_t sequence = options_.layout->ring_sequence(chunk, step);
  if (sequence < 0) return Status::Ok();
  // The first round finds the slots empty.
  const int64_t freed = std::max<int64_t>(0, sequence - options_.layout->ring_slot_count() + 1);
  return Await(options_.page->backlog_freed(), freed);
}

// The gather waited for those chunks alone that hold rows of this batch.
Status DataPlane::AwaitRowsRead(const Node& node, int64_t step) const {
  const SharedLayout& layout = *options_.layout;
  for (int64_t c = layout.first_chunk(node.unit); c < layout.first_chunk(node.unit + 1); ++c) {
    OOM_RETURN_IF_ERROR(AwaitVersion(c, step));
  }
  return Status::Ok();
}

Status DataPlane::LoadUnit(const Node& node, int64_t step, std::byte* window) {
  const SharedLayout& layout = *options_.layout;
  for (int64_t c = layout.first_chunk(node.unit); c < layout.first_chunk(node.unit + 1); ++c) {
    OOM_RETURN_IF_ERROR(AwaitVersion(c, step));
    const Chunk& chunk = layout.chunks()[c];
    std::byte* to = window + chunk.first_element * layout.weight_bytes();
    Region from = layout.weights(c);
    if (layout.sharded(node.unit)) {
      from.bytes /= layout.rank_count();
      from.offset_bytes += options_.rank * from.bytes;
      to += options_.rank * from.bytes;
    }
    OOM_RETURN_IF_ERROR(layout.resident(node.unit) ? CopyFromOwner(to, chunk) : CopyIn(to, from));
    transfers_.Add(node.resource, node.unit, from.bytes);
  }
  return Status::Ok();
}

Status DataPlane::GatherUnit(const Node& node, std::byte* window) {
  const SharedLayout& layout = *options_.layout;
  for (int64_t c = layout.first_chunk(node.unit); c < layout.first_chunk(node.unit + 1); ++c) {
    const Chunk& chunk = layout.chunks()[c];
    OOM_RETURN_IF_ERROR(
        GatherSlices(window + chunk.first_element * layout.weight_bytes(), chunk));
    const int64_t bytes = layout.weights(c).bytes;
    transfers_.Add(node.resource, node.unit, bytes - bytes / layout.rank_count());
  }
  return Status::Ok();
}

DataPlane::StoredGradient DataPlane::ToStore(const Node& node, int64_t step,
                                             const std::byte* from) const {
  const SharedLayout& layout = *options_.layout;
  const Chunk& chunk = layout.chunks()[node.chunk];
  StoredGradient stored{.place = layout.gradient_of_rank(node.chunk, options_.rank, step)};
  if (layout.reduces_on_devices()) {
    stored.values = from;
    stored.bfloat16 = layout.reduction() == v1::GRADIENT_REDUCTION_DEVICE_BFLOAT16;
    stored.elements = chunk.elements / layout.rank_count();
  } else {
    stored.values = from + chunk.first_element * static_cast<int64_t>(sizeof(float));
    stored.elements = chunk.elements;
  }
  return stored;
}

Status DataPlane::StoreBoundary(const Node& node, const std::byte* from) {
  const Region region = options_.layout->boundary(options_.rank, node.layer);
  transfers_.Add(node.resource, node.unit, region.bytes);
  return CopyOut(region, from);
}

Status DataPlane::LoadBoundary(const Node& node, std::byte* to) {
  const Region region = options_.layout->boundary(options_.rank, node.layer);
  transfers_.Add(node.resource, node.unit, region.bytes);
  return CopyIn(to, region);
}

Status DataPlane::PublishRowSet(int64_t step, std::span<const int32_t> row_numbers) {
  const SharedLayout::RowGradient rows = options_.layout->embedding_rows(options_.rank);
  const auto count = static_cast<int64_t>(row_numbers.size());
  OOM_CHECK(count <= rows.max_rows);
  // A step is granted when the one two before it is complete: nobody reads that one's set any more.
  std::byte* set = options_.pools->At(rows.region) + rows.row_set_offset_bytes(step);
  std::memcpy(set, &count, sizeof(count));
  std::memcpy(set + rows.kRowNumbersOffset, row_numbers.data(), row_numbers.size_bytes());
  return Status::Ok();
}

Result<int64_t> DataPlane::AddRouterCounts(int64_t step, std::span<int64_t> choices_E) const {
  std::fill(choices_E.begin(), choices_E.end(), 0);
  int64_t tokens = 0;
  for (int rank = 0; rank < options_.layout->rank_count(); ++rank) {
    OOM_RETURN_IF_ERROR(Await(options_.page->router_counted(rank), step + 1));
    const RouterCounts counts = options_.page->router_counts(rank, step);
    tokens += counts.tokens;
    for (size_t e = 0; e < choices_E.size(); ++e) choices_E[e] += counts.choices_E[e];
  }
  return tokens;
}

Status DataPlane::AwaitGate(int64_t step, double* clip) const {
  const ControlPage& page = *options_.page;
  *clip = 1.0;
  if (options_.update_mode == v1::UPDATE_MODE_OVERLAPPED) {
    bool finite = true;
    for (int rank = 0; rank < options_.layout->rank_count(); ++rank) {
      OOM_RETURN_IF_ERROR(Await(page.loss_known(rank), step + 1));
      const RankRecord& record = page.rank_record(rank, step);
      finite = finite && std::isfinite(record.loss_sum) && std::isfinite(record.auxiliary_loss);
    }
    if (finite) return Status::Ok();
    // The job host ends this attempt: until it does, nothing is applied.
  }
  OOM_RETURN_IF_ERROR(Await(page.clip_known(), step + 1));
  *clip = page.clip_record(step).clip;
  return Status::Ok();
}

}  // namespace oom
