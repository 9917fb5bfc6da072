#include "worker/cpu_data_plane.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "runtime/base/check.h"

namespace oom {
namespace {

float ToFloat(float value) { return value; }
float ToFloat(uint16_t bfloat16) {
  return std::bit_cast<float>(static_cast<uint32_t>(bfloat16) << 16);
}

template <class Element>
void AddValues(const Element* values, bool first, std::vector<float>* sum) {
  for (size_t i = 0; i < sum->size(); ++i) {
    (*sum)[i] = first ? ToFloat(values[i]) : (*sum)[i] + ToFloat(values[i]);
  }
}

}  // namespace

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
  OOM_CHECK(layout.used_in_place(unit));
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

Status CpuDataPlane::CopyFromOwner(std::byte* to, const Chunk& chunk) {
  return CopyIn(to, options_.layout->weights(chunk.index));
}

// They lie in the host's memory, at the version that this rank has waited for: the chunk's next update waits for
// this rank's gradient.
Status CpuDataPlane::GatherSlices(std::byte* to, const Chunk& chunk) {
  Region slice = options_.layout->weights(chunk.index);
  slice.bytes /= options_.layout->rank_count();
  for (int rank = 0; rank < options_.layout->rank_count(); ++rank) {
    if (rank != options_.rank) OOM_RETURN_IF_ERROR(CopyIn(to + rank * slice.bytes, slice));
    slice.offset_bytes += slice.bytes;
  }
  return Status::Ok();
}

Status CpuDataPlane::ReduceGradient(const Node& node, const float* unit_gradient,
                                    std::byte* slice) {
  const SharedLayout& layout = *options_.layout;
  const ControlPage& page = *options_.page;
  const Chunk& chunk = layout.chunks()[node.chunk];
  const bool rounds = layout.reduction() == v1::GRADIENT_REDUCTION_DEVICE_BFLOAT16;
  const int64_t sequence = exchange_count_++;
  // Its place is free once everybody has read the exchange before the last.
  for (int rank = 0; rank < layout.rank_count(); ++rank) {
    OOM_RETURN_IF_ERROR(Await(page.exchange_read(rank), std::max<int64_t>(0, sequence - 1)));
  }
  const std::span<const float> partial(unit_gradient + chunk.first_element,
                                       static_cast<size_t>(chunk.elements));
  std::byte* own = options_.pools->At(layout.exchange(options_.rank, sequence));
  if (rounds) {
    RoundToBfloat16(partial, reinterpret_cast<uint16_t*>(own));
  } else {
    std::memcpy(own, partial.data(), partial.size_bytes());
  }
  page.exchange_ready(options_.rank).Publish(static_cast<uint64_t>(sequence + 1));
  const int64_t elements = chunk.elements / layout.rank_count();
  sum_.resize(static_cast<size_t>(elements));
  for (int rank = 0; rank < layout.rank_count(); ++rank) {
    OOM_RETURN_IF_ERROR(Await(page.exchange_ready(rank), sequence + 1));
    const std::byte* from = options_.pools->At(layout.exchange(rank, sequence));
    if (rounds) {
      AddValues(reinterpret_cast<const uint16_t*>(from) + options_.rank * elements, rank == 0, &sum_);
    } else {
      AddValues(reinterpret_cast<const float*>(from) + options_.rank * elements, rank == 0, &sum_);
    }
  }
  page.exchange_read(options_.rank).Publish(static_cast<uint64_t>(sequence + 1));
  if (rounds) {
    RoundToBfloat16(sum_, reinterpret_cast<uint16_t*>(slice));
  } else {
    std::memcpy(slice, sum_.data(), sum_.size() * sizeof(float));
  }
  transfers_.Add(node.resource, node.unit, node.bytes);
  return Status::Ok();
}

Status CpuDataPlane::StoreGradient(const Node& node, int64_t step, const std::byte* from) {
  const SharedLayout& layout = *options_.layout;
  OOM_RETURN_IF_ERROR(AwaitSlot(node.chunk, step));
  const StoredGradient stored = ToStore(node, step, from);
  const std::span<const float> values(reinterpret_cast<const float*>(stored.values),
                                      static_cast<size_t>(stored.elements));
  std::byte* to = options_.pools->At(stored.place);
  if (stored.bfloat16) {
    std::memcpy(to, stored.values, static_cast<size_t>(stored.place.bytes));
  } else if (layout.gradient_bytes() == 2) {
    RoundToBfloat16(values, reinterpret_cast<uint16_t*>(to));
  } else if (node.micro_batch == 0) {
    std::memcpy(to, values.data(), values.size_bytes());
  } else {
    AccumulateFloat32(values, reinterpret_cast<float*>(to));
  }
  if (node.resource != Resource::kDeviceUpdate) {
    transfers_.Add(node.resource, node.unit, stored.place.bytes);
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

Status CpuDataPlane::PublishRouterCounts(int64_t step, const int64_t* choices_E, int64_t tokens) {
  const RouterCounts counts = options_.page->router_counts(options_.rank, step);
  counts.tokens = tokens;
  std::copy_n(choices_E, counts.choices_E.size(), counts.choices_E.begin());
  options_.page->router_counted(options_.rank).Publish(static_cast<uint64_t>(step + 1));
  return Status::Ok();
}

Result<int64_t> CpuDataPlane::SumRouterCounts(int64_t step, int64_t* choices_E) {
  return AddRouterCounts(step,
                         {choices_E, static_cast<size_t>(options_.page->layout().expert_count)});
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
