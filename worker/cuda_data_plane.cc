#include "worker/cuda_data_plane.h"

#include <cuda_bf16.h>

#include <algorithm>
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

CudaDataPlane::CudaDataPlane(const Options& options, const Scratch& scratch)
    : DataPlane(options), scratch_(scratch) {
  OOM_CHECK(options.accumulation == 1);
}

Status CudaDataPlane::StoreWord(const SharedWord& word, int64_t value) {
  OOM_RETURN_IF_CUDA_ERROR(
      StreamWriteValue(CurrentCudaStream(), &word, static_cast<uint64_t>(value)),
      "a store to the control page");
  return Status::Ok();
}

void CudaDataPlane::PublishRowSet(int64_t step, std::span<const int32_t> row_numbers) {
  DataPlane::PublishRowSet(step, row_numbers);
  if (scratch_.row_numbers == nullptr) return;
  const SharedLayout::RowGradient rows = options_.layout->embedding_rows(options_.rank);
  // From its place in the pool, which stays as it is for two steps.
  const std::span<const int32_t> set =
      RowSet(*options_.layout, *options_.pools, options_.rank, step);
  OOM_CUDA_CHECK(cudaMemcpyAsync(scratch_.row_numbers + step % 2 * rows.max_rows, set.data(),
                                 set.size_bytes(), cudaMemcpyHostToDevice, CurrentCudaStream()));
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
  OOM_CHECK(layout.resident(unit) && layout.rank_count() == 1);
  return options_.pools->At(layout.weights(layout.first_chunk(unit)));
}

Status CudaDataPlane::StoreGradient(const Node& node, int64_t step, const float* unit_gradient) {
  const SharedLayout& layout = *options_.layout;
  const Chunk& chunk = layout.chunks()[node.chunk];
  OOM_RETURN_IF_ERROR(AwaitSlot(node.chunk, step));
  const float* partial = unit_gradient + chunk.first_element;
  const Region place = layout.gradient(node.chunk, options_.rank, step);
  std::byte* to = options_.pools->At(place);
  if (layout.resident(node.unit)) {
    if (layout.gradient_bytes() == 2) {
      RoundToBfloat16(partial, chunk.elements, reinterpret_cast<uint16_t*>(to), CurrentCudaStream());
      return Status::Ok();
    }
    return Copy(to, partial, place.bytes, cudaMemcpyDeviceToDevice);
  }
  const void* from = partial;
  if (layout.gradient_bytes() == 2) {
    RoundToBfloat16(partial, chunk.elements, reinterpret_cast<uint16_t*>(scratch_.partials),
                    CurrentCudaStream());
    from = scratch_.partials;
  }
  OOM_RETURN_IF_ERROR(CopyOut(place, from));
  transfers_.Add(node.resource, node.unit, place.bytes);
  return StoreWord(options_.page->landed(options_.rank, node.chunk), step + 1);
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
Status CudaDataPlane::WithGradient(const Chunk& chunk, int64_t step, const Use& use) {
  const SharedLayout& layout = *options_.layout;
  const ParameterUnit& unit = layout.units()[chunk.unit];
  if (unit.kind != UnitKind::kEmbedding) {
    const std::byte* partial = options_.pools->At(layout.gradient(chunk.index, options_.rank, step));
    return layout.gradient_bytes() == 2 ? use(reinterpret_cast<const uint16_t*>(partial))
                                        : use(reinterpret_cast<const float*>(partial));
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
  const auto dense = [&](auto* values, auto* out) {
    DenseRows(range, values + first_row * width, out, CurrentCudaStream());
    return use(const_cast<const std::remove_pointer_t<decltype(out)>*>(out));
  };
  return layout.row_gradient_bytes() == 2
             ? dense(reinterpret_cast<const uint16_t*>(scratch_.rows),
                     reinterpret_cast<uint16_t*>(scratch_.row_gradient))
             : dense(reinterpret_cast<const float*>(scratch_.rows),
                     reinterpret_cast<float*>(scratch_.row_gradient));
}

namespace {

Bfloat16Partials PartialsOf(const uint16_t* const& partial) { return {{&partial, 1}}; }
Float32Partials PartialsOf(const float* const& partial) { return {{&partial, 1}}; }

}  // namespace

Status CudaDataPlane::Norm(const Node& node, int64_t step) {
  const Chunk& chunk = options_.layout->chunks()[node.chunk];
  // The job host adds up norm_squares of the step before until it says so.
  OOM_RETURN_IF_ERROR(Await(options_.page->clip_known(), step));
  double* squares = options_.page->norm_squares().data() + chunk.first_block;
  OOM_RETURN_IF_ERROR(WithGradient(chunk, step, [&](const auto* partial) {
    GradientSquares(PartialsOf(partial), chunk.elements, squares, scratch_.finite + chunk.index,
                    CurrentCudaStream());
    return Status::Ok();
  }));
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
  OOM_RETURN_IF_ERROR(WithGradient(chunk, step, [&](const auto* partial) {
    const SplitState split{.weight = reinterpret_cast<uint16_t*>(weights), .rest = rest};
    if constexpr (std::is_same_v<decltype(partial), const float*>) {
      if (layout.float32()) {
        AdamWUpdate(options, PartialsOf(partial),
                    MasterState{.master = reinterpret_cast<float*>(weights), .rest = rest},
                    chunk.elements, CurrentCudaStream());
        return Status::Ok();
      }
    }
    AdamWUpdate(options, PartialsOf(partial), split, chunk.elements, CurrentCudaStream());
    return Status::Ok();
  }));
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
