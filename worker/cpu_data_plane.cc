#include "worker/cpu_data_plane.h"

#include <algorithm>
#include <cstring>

#include "runtime/base/check.h"

namespace oom {

CpuDataPlane::CpuDataPlane(const Options& options)
    : DataPlane(options),
      update_(options.layout, options.pools, options.accumulation, options.simd) {}

Status CpuDataPlane::CopyIn(std::byte* to, const Region& from) {
  std::memcpy(to, options_.pools->At(from), static_cast<size_t>(from.bytes));
  return Status::Ok();
}

Status CpuDataPlane::CopyOut(const Region& to, const void* from) {
  std::memcpy(options_.pools->At(to), from, static_cast<size_t>(to.bytes));
  return Status::Ok();
}

Status CpuDataPlane::GatherRows(const Node& node, int64_t step, int64_t width,
                                std::span<const int32_t> tokens, const int32_t*, std::byte* out) {
  const int64_t row_bytes = width * options_.layout->weight_bytes();
  for (const int64_t token : tokens) {
    OOM_RETURN_IF_ERROR(CopyWeights(node.unit, step, token * width, width, out));
    out += row_bytes;
  }
  return Status::Ok();
}

Result<std::byte*> CpuDataPlane::WeightsInPlace(int64_t unit, int64_t step) {
  const SharedLayout& layout = *options_.layout;
  OOM_CHECK(layout.resident(unit) && layout.rank_count() == 1);
  const int64_t first = layout.first_chunk(unit);
  for (int64_t c = first; c < layout.first_chunk(unit + 1); ++c) {
    OOM_RETURN_IF_ERROR(AwaitVersion(c, step));
  }
  return options_.pools->At(layout.weights(first));
}

Status CpuDataPlane::CopyWeights(int64_t unit, int64_t step, int64_t first_element,
                                 int64_t elements, std::byte* out) {
  const SharedLayout& layout = *options_.layout;
  const int64_t first_chunk = layout.first_chunk(unit);
  const int64_t chunk_elements = layout.chunks()[first_chunk].elements;
  while (elements > 0) {
    const int64_t c = first_chunk + first_element / chunk_elements;
    const Chunk& chunk = layout.chunks()[c];
    OOM_RETURN_IF_ERROR(AwaitVersion(c, step));
    const int64_t within = first_element - chunk.first_element;
    const int64_t count = std::min(elements, chunk.elements - within);
    std::memcpy(out, options_.pools->At(layout.weights(c)) + within * layout.weight_bytes(),
                static_cast<size_t>(count * layout.weight_bytes()));
    if (!layout.resident(unit)) {
      transfers_.Add(Resource::kHostToDevice, unit, count * layout.weight_bytes());
    }
    out += count * layout.weight_bytes();
    first_element += count;
    elements -= count;
  }
  return Status::Ok();
}

Status CpuDataPlane::StoreGradient(const Node& node, int64_t step, const float* unit_gradient) {
  const SharedLayout& layout = *options_.layout;
  const Chunk& chunk = layout.chunks()[node.chunk];
  OOM_RETURN_IF_ERROR(AwaitSlot(node.chunk, step));
  const std::span<const float> partial(unit_gradient + chunk.first_element,
                                       static_cast<size_t>(chunk.elements));
  std::byte* to = options_.pools->At(layout.gradient(node.chunk, options_.rank, step));
  if (layout.gradient_bytes() == 2) {
    RoundToBfloat16(partial, reinterpret_cast<uint16_t*>(to));
  } else if (node.micro_batch == 0) {
    std::memcpy(to, partial.data(), partial.size_bytes());
  } else {
    AccumulateFloat32(partial, reinterpret_cast<float*>(to));
  }
  if (node.resource != Resource::kDeviceUpdate) {
    transfers_.Add(node.resource, node.unit, chunk.elements * layout.gradient_bytes());
  }
  if (node.micro_batch + 1 == options_.accumulation) {
    options_.page->landed(options_.rank, node.chunk).Publish(static_cast<uint64_t>(step + 1));
    options_.page->bell().Ring();
  }
  return Status::Ok();
}

Status CpuDataPlane::StoreRows(const Node& node, int64_t step, const float* sums,
                               int64_t elements) {
  const SharedLayout& layout = *options_.layout;
  const SharedLayout::RowGradient rows = layout.embedding_rows(options_.rank);
  OOM_RETURN_IF_ERROR(AwaitRowsRead(node, step));
  std::byte* values = options_.pools->At(rows.region) + rows.rows_offset_bytes;
  if (layout.row_gradient_bytes() == 2) {
    RoundToBfloat16({sums, static_cast<size_t>(elements)}, reinterpret_cast<uint16_t*>(values));
  } else {
    std::memcpy(values, sums, static_cast<size_t>(elements) * sizeof(float));
  }
  if (node.resource == Resource::kDeviceToHost) {
    transfers_.Add(node.resource, node.unit, elements * layout.row_gradient_bytes());
  }
  for (int64_t c = layout.first_chunk(node.unit); c < layout.first_chunk(node.unit + 1); ++c) {
    options_.page->landed(options_.rank, c).Publish(static_cast<uint64_t>(step + 1));
  }
  options_.page->bell().Ring();
  return Status::Ok();
}

Status CpuDataPlane::PublishLoss(int64_t step, const Loss& loss) {
  RankRecord& record = options_.page->rank_record(options_.rank, step);
  record.step = step;
  record.loss_sum = *loss.loss_sum;
  record.valid_targets = loss.valid_targets;
  record.auxiliary_loss = loss.auxiliary_loss == nullptr ? 0.0 : *loss.auxiliary_loss;
  options_.page->loss_known(options_.rank).Publish(static_cast<uint64_t>(step + 1));
  options_.page->bell().Ring();
  return Status::Ok();
}

Status CpuDataPlane::Norm(const Node& node, int64_t step) {
  const SharedLayout& layout = *options_.layout;
  const Chunk& chunk = layout.chunks()[node.chunk];
  for (int rank = 0; rank < layout.rank_count(); ++rank) {
    OOM_RETURN_IF_ERROR(Await(options_.page->landed(rank, node.chunk), step + 1));
  }
  // The job host adds up norm_squares of the step before until it says so.
  OOM_RETURN_IF_ERROR(Await(options_.page->clip_known(), step));
  const auto blocks = static_cast<size_t>(chunk.elements / kBlockElements);
  const bool finite = update_.Squares(
      node.chunk, step, 0,
      options_.page->norm_squares().subspan(static_cast<size_t>(chunk.first_block), blocks),
      &scratch_);
  if (!finite) return NonFiniteGradient(layout, node.chunk, step);
  options_.page->norm_known(node.chunk).Publish(static_cast<uint64_t>(step + 1));
  options_.page->bell().Ring();
  return Status::Ok();
}

Status CpuDataPlane::Update(const Node& node, int64_t step) {
  const SharedLayout& layout = *options_.layout;
  double clip = 1.0;
  OOM_RETURN_IF_ERROR(AwaitGate(step, &clip));
  const ScopedOptimizerMxcsr mxcsr;
  const double rate = LearningRate(options_.schedule, step);
  update_.Apply(node.chunk, step, 0, layout.chunks()[node.chunk].elements / kBlockElements,
                MakeAdamWScalars(options_.hyper, rate, step + 1, true, clip),
                MakeAdamWScalars(options_.hyper, rate, step + 1, false, clip), &scratch_);
  TakeSnapshot(node.chunk, step);
  options_.page->version(node.chunk).Publish(static_cast<uint64_t>(step + 1));
  options_.page->bell().Ring();
  return Status::Ok();
}

void CpuDataPlane::TakeSnapshot(int64_t chunk, int64_t step) const {
  const auto cut = static_cast<uint64_t>(step + 1);
  if (options_.page->checkpoint_step().Load() != cut) return;
  const SharedLayout& layout = *options_.layout;
  std::byte* to = options_.pools->At(layout.snapshot(chunk));
  const Region weights = layout.weights(chunk);
  const Region rest = layout.rest(chunk);
  std::memcpy(to, options_.pools->At(weights), static_cast<size_t>(weights.bytes));
  std::memcpy(to + weights.bytes, options_.pools->At(rest), static_cast<size_t>(rest.bytes));
  options_.page->snapshot_taken(chunk).Publish(cut);
}

}  // namespace oom
