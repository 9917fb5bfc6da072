#include "worker/cuda_data_plane.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "runtime/base/check.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_driver.h"
#include "runtime/device/cuda_memory.h"
#include "runtime/device/cuda_stream.h"
#include "runtime/kernels/adamw.h"
#include "runtime/kernels/dense_rows.h"
#include "runtime/kernels/gradient.h"
#include "runtime/kernels/token_rows.h"
#include "runtime/optim/chunk_update.h"

namespace oom {
namespace {

Status Copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
  OOM_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, CurrentCudaStream()),
      "a copy between host and device");
  return Status::Ok();
}

// Calls copy(offset, bytes) for the parts of a region that lie in one registered piece each.
template <class CopyPart>
Status ByRegisteredPiece(const Region& region, const CopyPart& copy) {
  for (int64_t done = 0; done < region.bytes;) {
    const int64_t in_piece = (region.offset_bytes + done) % kRegisteredPieceBytes;
    const int64_t bytes = std::min(region.bytes - done, kRegisteredPieceBytes - in_piece);
    OOM_RETURN_IF_ERROR(copy(done, bytes));
    done += bytes;
  }
  return Status::Ok();
}

}  // namespace

Status CudaDataPlane::CopyIn(std::byte* to, const Region& from) {
  const std::byte* host = options_.pools->At(from);
  return ByRegisteredPiece(from, [&](int64_t offset, int64_t bytes) {
    return Copy(to + offset, host + offset, bytes, cudaMemcpyHostToDevice);
  });
}

Status CudaDataPlane::CopyOut(const Region& to, const void* from) {
  std::byte* host = options_.pools->At(to);
  return ByRegisteredPiece(to, [&](int64_t offset, int64_t bytes) {
    return Copy(host + offset, static_cast<const std::byte*>(from) + offset, bytes,
                cudaMemcpyDeviceToHost);
  });
}

CudaDataPlane::CudaDataPlane(const Options& options, const Scratch& scratch,
                             NcclCommunicator* communicator)
    : DataPlane(options), scratch_(scratch), communicator_(communicator) {
  OOM_CHECK(communicator != nullptr || !options.layout->exchanges());
}

Status CudaDataPlane::StoreWord(const SharedWord& word, int64_t value) {
  OOM_RETURN_IF_CUDA_ERROR(
      StreamWriteValue(CurrentCudaStream(), &word, static_cast<uint64_t>(value)),
      "a store to the control page");
  return Status::Ok();
}

Status CudaDataPlane::PublishRowSet(int64_t step, std::span<const int32_t> row_numbers) {
  OOM_RETURN_IF_ERROR(DataPlane::PublishRowSet(step, row_numbers));
  if (scratch_.row_numbers == nullptr) return Status::Ok();
  const SharedLayout::RowGradient rows = options_.layout->embedding_rows(options_.rank);
  // From its place in the pool, which stays as it is for two steps.
  const std::span<const int32_t> set =
      RowSet(*options_.layout, *options_.pools, options_.rank, step);
  return Copy(scratch_.row_numbers + step % 2 * rows.max_rows, set.data(),
              static_cast<int64_t>(set.size_bytes()), cudaMemcpyHostToDevice);
}

Status CudaDataPlane::GatherRows(const Node& node, int64_t step, int64_t width,
                                 std::span<const int32_t> tokens, const int32_t* device_tokens,
                                 std::byte* out) {
  const SharedLayout& layout = *options_.layout;
  const int64_t first_chunk = layout.first_chunk(node.unit);
  const bool resident = layout.resident(node.unit);
  if (!resident) {
    const int64_t chunk_elements = layout.chunks()[first_chunk].elements;
    std::vector<char> needed(
        static_cast<size_t>(layout.first_chunk(node.unit + 1) - first_chunk), 0);
    for (const int64_t token : tokens) {
      std::fill(needed.begin() + token * width / chunk_elements,
                needed.begin() + ((token + 1) * width - 1) / chunk_elements + 1, 1);
    }
    for (size_t c = 0; c < needed.size(); ++c) {
      if (needed[c]) OOM_RETURN_IF_ERROR(AwaitVersion(first_chunk + static_cast<int64_t>(c), step));
    }
    transfers_.Add(node.resource, node.unit,
                   static_cast<int64_t>(tokens.size()) * width * layout.weight_bytes());
  }
  // A unit's weights are contiguous in their pool, and the device reads the host's memory where it lies.
  const std::byte* weights = options_.pools->At(layout.weights(first_chunk));
  const RowGather gather{.index_R = device_tokens,
                         .row_count = static_cast<int64_t>(tokens.size()),
                         .hidden_size = width};
  if (layout.float32()) {
    oom::GatherRows(gather, reinterpret_cast<const float*>(weights), reinterpret_cast<float*>(out),
                    CurrentCudaStream());
  } else {
    oom::GatherRows(gather, reinterpret_cast<const __nv_bfloat16*>(weights),
                    reinterpret_cast<__nv_bfloat16*>(out), CurrentCudaStream());
  }
  return Status::Ok();
}

// The graph's edges order its readers after its updates: both are this device's.
Result<std::byte*> CudaDataPlane::WeightsInPlace(int64_t unit, int64_t) {
  const SharedLayout& layout = *options_.layout;
  OOM_CHECK(layout.used_in_place(unit));
  return options_.pools->At(layout.weights(layout.first_chunk(unit)));
}

Status CudaDataPlane::CopyFromOwner(std::byte* to, const Chunk& chunk) {
  const Region weights = options_.layout->weights(chunk.index);
  const bool own = chunk.owner_rank == options_.rank;
  return communicator_->Broadcast(chunk.owner_rank, own ? options_.pools->At(weights) : nullptr, to,
                                  weights.bytes);
}

Status CudaDataPlane::GatherSlices(std::byte* to, const Chunk& chunk) {
  const SharedLayout& layout = *options_.layout;
  return communicator_->AllGather(to, layout.weights(chunk.index).bytes / layout.rank_count());
}

Status CudaDataPlane::ReduceGradient(const Node& node, const float* unit_gradient,
                                     std::byte* slice) {
  const SharedLayout& layout = *options_.layout;
  const Chunk& chunk = layout.chunks()[node.chunk];
  const float* partial = unit_gradient + chunk.first_element;
  const int64_t slice_elements = chunk.elements / layout.rank_count();
  transfers_.Add(node.resource, node.unit, node.bytes);
  if (layout.reduction() == v1::GRADIENT_REDUCTION_DEVICE_FLOAT32) {
    return communicator_->ReduceScatter(partial, slice_elements, reinterpret_cast<float*>(slice));
  }
  auto* rounded = reinterpret_cast<uint16_t*>(scratch_.exchanged);
  RoundToBfloat16(partial, chunk.elements, rounded, CurrentCudaStream());
  return communicator_->ReduceScatter(rounded, slice_elements, reinterpret_cast<uint16_t*>(slice));
}

Status CudaDataPlane::StoreGradient(const Node& node, int64_t step, const std::byte* from) {
  const SharedLayout& layout = *options_.layout;
  OOM_RETURN_IF_ERROR(AwaitSlot(node.chunk, step));
  const StoredGradient stored = ToStore(node, step, from);
  if (layout.resident(node.unit)) {
    return layout.rank_count() == 1 ? StoreResident(node, stored) : SendToOwner(node, step, stored);
  }
  const auto* values = reinterpret_cast<const float*>(stored.values);
  if (layout.gradient_bytes() == 2 && !stored.bfloat16) {
    RoundToBfloat16(values, stored.elements, reinterpret_cast<uint16_t*>(scratch_.partials),
                    CurrentCudaStream());
    OOM_RETURN_IF_ERROR(CopyOut(stored.place, scratch_.partials));
  } else if (node.micro_batch > 0) {
    AccumulateFloat32OnHost(values, stored.elements,
                            reinterpret_cast<float*>(options_.pools->At(stored.place)),
                            CurrentCudaStream());
  } else {
    OOM_RETURN_IF_ERROR(CopyOut(stored.place, stored.values));
  }
  transfers_.Add(node.resource, node.unit, stored.place.bytes);
  if (node.micro_batch + 1 < options_.accumulation) return Status::Ok();
  return StoreWord(options_.page->landed(options_.rank, node.chunk), step + 1);
}

Status CudaDataPlane::StoreResident(const Node& node, const StoredGradient& stored) {
  std::byte* to = options_.pools->At(stored.place);
  const auto* values = reinterpret_cast<const float*>(stored.values);
  if (options_.layout->gradient_bytes() == 2) {
    RoundToBfloat16(values, stored.elements, reinterpret_cast<uint16_t*>(to), CurrentCudaStream());
  } else if (node.micro_batch > 0) {
    AccumulateFloat32(values, stored.elements, reinterpret_cast<float*>(to), CurrentCudaStream());
  } else {
    return Copy(to, values, stored.place.bytes, cudaMemcpyDeviceToDevice);
  }
  return Status::Ok();
}

// The owner's own exchange ends when everybody's part is there: no word says so.
Status CudaDataPlane::SendToOwner(const Node& node, int64_t step, const StoredGradient& stored) {
  const SharedLayout& layout = *options_.layout;
  const std::byte* from = stored.values;
  if (layout.gradient_bytes() == 2 && !stored.bfloat16) {
    RoundToBfloat16(reinterpret_cast<const float*>(from), stored.elements,
                    reinterpret_cast<uint16_t*>(scratch_.exchanged), CurrentCudaStream());
    from = scratch_.exchanged;
  }
  const int owner = layout.chunks()[node.chunk].owner_rank;
  std::byte* to = owner == options_.rank
                      ? options_.pools->At(layout.gradient(node.chunk, 0, step))
                      : nullptr;
  transfers_.Add(node.resource, node.unit, stored.place.bytes);
  return communicator_->GatherTo(owner, from, stored.place.bytes, to);
}

Status CudaDataPlane::StoreRows(const Node& node, int64_t step, const float* sums,
                                int64_t elements) {
  const SharedLayout& layout = *options_.layout;
  const SharedLayout::RowGradient rows = layout.embedding_rows(options_.rank);
  const bool resident = layout.resident(node.unit);
  std::byte* rounded = resident ? scratch_.rows : scratch_.partials;
  const int64_t bytes = elements * layout.row_gradient_bytes();
  if (!resident) OOM_RETURN_IF_ERROR(AwaitRowsRead(node, step));
  if (layout.row_gradient_bytes() == 2) {
    RoundToBfloat16(sums, elements, reinterpret_cast<uint16_t*>(rounded), CurrentCudaStream());
  } else {
    OOM_RETURN_IF_ERROR(Copy(rounded, sums, bytes, cudaMemcpyDeviceToDevice));
  }
  if (resident) return Status::Ok();
  OOM_RETURN_IF_ERROR(CopyOut({.pool = rows.region.pool,
                               .offset_bytes = rows.region.offset_bytes + rows.rows_offset_bytes,
                               .bytes = bytes},
                              rounded));
  transfers_.Add(node.resource, node.unit, bytes);
  for (int64_t c = layout.first_chunk(node.unit); c < layout.first_chunk(node.unit + 1); ++c) {
    OOM_RETURN_IF_ERROR(StoreWord(options_.page->landed(options_.rank, c), step + 1));
  }
  return Status::Ok();
}

Status CudaDataPlane::PublishRouterCounts(int64_t step, const int64_t* choices_E, int64_t tokens) {
  const RouterCounts counts = options_.page->router_counts(options_.rank, step);
  counts.tokens = tokens;
  OOM_RETURN_IF_ERROR(Copy(counts.choices_E.data(), choices_E,
                           static_cast<int64_t>(counts.choices_E.size_bytes()),
                           cudaMemcpyDeviceToHost));
  return StoreWord(options_.page->router_counted(options_.rank), step + 1);
}

// The copy of the step before has left the staging once this rank's own word is there: the stream
// stored it behind that copy.
Result<int64_t> CudaDataPlane::SumRouterCounts(int64_t step, int64_t* choices_E) {
  OOM_RETURN_IF_ERROR(Await(options_.page->router_counted(options_.rank), step + 1));
  const std::span<int64_t> sum(scratch_.router_choices,
                               static_cast<size_t>(options_.page->layout().expert_count));
  OOM_ASSIGN_OR_RETURN(const int64_t tokens, AddRouterCounts(step, sum));
  OOM_RETURN_IF_ERROR(
      Copy(choices_E, sum.data(), static_cast<int64_t>(sum.size_bytes()), cudaMemcpyHostToDevice));
  return tokens;
}

Status CudaDataPlane::PublishLoss(int64_t step, const Loss& loss) {
  RankRecord& record = options_.page->rank_record(options_.rank, step);
  record.step = step;
  record.valid_targets = loss.valid_targets;
  record.auxiliary_loss = 0.0;
  OOM_RETURN_IF_ERROR(
      Copy(&record.loss_sum, loss.loss_sum, sizeof(double), cudaMemcpyDeviceToHost));
  if (loss.auxiliary_loss != nullptr) {
    OOM_RETURN_IF_ERROR(
        Copy(&record.auxiliary_loss, loss.auxiliary_loss, sizeof(double), cudaMemcpyDeviceToHost));
  }
  return StoreWord(options_.page->loss_known(options_.rank), step + 1);
}

template <class Use>
void CudaDataPlane::WithGradient(const Chunk& chunk, int64_t step, const Use& use) {
  const SharedLayout& layout = *options_.layout;
  const ParameterUnit& unit = layout.units()[chunk.unit];
  if (!layout.gradient_by_row(chunk.unit)) {
    std::array<const uint16_t*, kMaxGradientRanks> narrow;
    std::array<const float*, kMaxGradientRanks> wide;
    const auto count = static_cast<size_t>(layout.partial_count());
    for (size_t i = 0; i < count; ++i) {
      const std::byte* partial =
          options_.pools->At(layout.gradient(chunk.index, static_cast<int>(i), step));
      narrow[i] = reinterpret_cast<const uint16_t*>(partial);
      wide[i] = reinterpret_cast<const float*>(partial);
    }
    if (layout.gradient_bytes() == 2) {
      use(Bfloat16Partials{{narrow.data(), count}});
    } else if (layout.float32()) {
      use(Float32Partials{{wide.data(), count}});
    } else {
      use(RoundedPartials{{wide.data(), count}});
    }
    return;
  }
  const int64_t width = unit.tensor(TensorRole::kEmbedding).shape[1];
  const std::span<const int32_t> set = RowSet(layout, *options_.pools, options_.rank, step);
  const auto first = std::lower_bound(set.begin(), set.end(),
                                      static_cast<int32_t>(chunk.first_element / width));
  const auto last = std::lower_bound(
      first, set.end(),
      static_cast<int32_t>((chunk.first_element + chunk.elements + width - 1) / width));
  const int64_t first_row = first - set.begin();
  const SharedLayout::RowGradient rows = layout.embedding_rows(options_.rank);
  const DenseRange range{
      .row_U = scratch_.row_numbers + step % 2 * rows.max_rows + first_row,
      .row_count = last - first,
      .width = width,
      .first = chunk.first_element,
      .elements = chunk.elements};
  if (layout.row_gradient_bytes() == 2) {
    auto* const out = reinterpret_cast<uint16_t*>(scratch_.row_gradient);
    const uint16_t* const partial = out;
    DenseRows(range, reinterpret_cast<const uint16_t*>(scratch_.rows) + first_row * width, out,
              CurrentCudaStream());
    use(Bfloat16Partials{{&partial, 1}});
  } else {
    auto* const out = reinterpret_cast<float*>(scratch_.row_gradient);
    const float* const partial = out;
    DenseRows(range, reinterpret_cast<const float*>(scratch_.rows) + first_row * width, out,
              CurrentCudaStream());
    use(Float32Partials{{&partial, 1}});
  }
}

Status CudaDataPlane::Norm(const Node& node, int64_t step) {
  const Chunk& chunk = options_.layout->chunks()[node.chunk];
  // The job host adds up norm_squares of the step before until it says so.
  OOM_RETURN_IF_ERROR(Await(options_.page->clip_known(), step));
  double* squares = options_.page->norm_squares().data() + chunk.first_block;
  WithGradient(chunk, step, [&](const auto& gradient) {
    GradientSquares(gradient, chunk.elements, squares, scratch_.finite + chunk.index,
                    CurrentCudaStream());
  });
  return StoreWord(options_.page->norm_known(node.chunk), step + 1);
}

Status CudaDataPlane::Update(const Node& node, int64_t step) {
  const SharedLayout& layout = *options_.layout;
  const Chunk& chunk = layout.chunks()[node.chunk];
  double clip = 1.0;
  OOM_RETURN_IF_ERROR(AwaitGate(step, &clip));
  OOM_RETURN_IF_ERROR(Await(options_.page->norm_known(node.chunk), step + 1));
  if (scratch_.finite[node.chunk] == 0) return NonFiniteGradient(layout, node.chunk, step);
  const double rate = LearningRate(options_.schedule, step);
  const DeviceAdamWOptions options{
      .scalars = MakeAdamWScalars(options_.hyper, rate, step + 1, true, clip),
      .decayed_blocks = scratch_.decayed_blocks + chunk.first_block};
  std::byte* weights = options_.pools->At(layout.weights(node.chunk));
  std::byte* rest = options_.pools->At(layout.rest(node.chunk));
  WithGradient(chunk, step, [&](const auto& gradient) {
    // FP32 as it lies is the gradient of FP32 state.
    if constexpr (std::is_same_v<decltype(gradient), const Float32Partials&>) {
      const MasterState state{.master = reinterpret_cast<float*>(weights), .rest = rest};
      AdamWUpdate(options, gradient, state, chunk.elements, CurrentCudaStream());
    } else {
      const SplitState state{.weight = reinterpret_cast<uint16_t*>(weights), .rest = rest};
      AdamWUpdate(options, gradient, state, chunk.elements, CurrentCudaStream());
    }
  });
  OOM_RETURN_IF_ERROR(TakeSnapshot(node.chunk, step));
  return StoreWord(options_.page->version(node.chunk), step + 1);
}

Status CudaDataPlane::TakeSnapshot(int64_t chunk, int64_t step) {
  if (options_.page->checkpoint_step().Load() != static_cast<uint64_t>(step + 1)) {
    return Status::Ok();
  }
  const SharedLayout& layout = *options_.layout;
  std::byte* to = options_.pools->At(layout.snapshot(chunk));
  const Region weights = layout.weights(chunk);
  const Region rest = layout.rest(chunk);
  OOM_RETURN_IF_ERROR(Copy(to, options_.pools->At(weights), weights.bytes, cudaMemcpyDeviceToHost));
  OOM_RETURN_IF_ERROR(
      Copy(to + weights.bytes, options_.pools->At(rest), rest.bytes, cudaMemcpyDeviceToHost));
  return StoreWord(options_.page->snapshot_taken(chunk), step + 1);
}

}  // namespace oom
