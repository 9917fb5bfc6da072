#include "runtime/optim/chunk_update.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "runtime/base/check.h"

namespace oom {
namespace {

constexpr int kMaxRanks = 64;

template <class Element>
struct PartialsOf;
template <>
struct PartialsOf<uint16_t> {
  using Type = Bfloat16Partials;
};
template <>
struct PartialsOf<float> {
  using Type = Float32Partials;
};

template <class Element>
std::vector<Element>& ScratchOf(ChunkUpdate::Scratch* scratch) {
  if constexpr (std::is_same_v<Element, float>) {
    return scratch->float32;
  } else {
    return scratch->bfloat16;
  }
}

}  // namespace

std::vector<uint8_t> DecayedBlocks(const ParameterUnit& unit) {
  std::vector<uint8_t> decayed(static_cast<size_t>(unit.elements / kBlockElements), 0);
  for (const TensorSpec& tensor : unit.tensors) {
    const int64_t first = tensor.offset_elements / kBlockElements;
    const int64_t last = (tensor.offset_elements + tensor.elements - 1) / kBlockElements;
    std::fill(decayed.begin() + first, decayed.begin() + last + 1, tensor.decayed ? 1 : 0);
  }
  return decayed;
}

Status NonFiniteGradient(const SharedLayout& layout, int64_t chunk, int64_t step) {
  const int64_t unit = layout.chunks()[static_cast<size_t>(chunk)].unit;
  return Status(Code::kFailedPrecondition,
                "the gradient of " + layout.units()[static_cast<size_t>(unit)].name +
                    " is not finite in step " + std::to_string(step + 1))
      .WithReason("NON_FINITE_GRADIENT");
}

ChunkUpdate::ChunkUpdate(const SharedLayout* layout, const PoolMap* pools, int accumulation,
                         SimdLevel level)
    : layout_(layout),
      pools_(pools),
      round_accumulators_(accumulation > 1 && !layout->float32()),
      level_(level) {
  OOM_CHECK(layout->rank_count() <= kMaxRanks);
  for (const ParameterUnit& unit : layout->units()) block_decayed_.push_back(DecayedBlocks(unit));
}

std::vector<char> ChunkUpdate::BlocksWithRows(int64_t chunk_index, int64_t step) const {
  const Chunk& chunk = layout_->chunks()[chunk_index];
  const ParameterUnit& unit = layout_->units()[chunk.unit];
  OOM_CHECK(layout_->gradient_by_row(chunk.unit));
  const int64_t width = unit.tensor(TensorRole::kEmbedding).shape[1];
  const int64_t end = chunk.first_element + chunk.elements;
  std::vector<char> has_rows(static_cast<size_t>(chunk.elements / kBlockElements), 0);
  for (int rank = 0; rank < layout_->rank_count(); ++rank) {
    const std::span<const int32_t> set = RowSet(*layout_, *pools_, rank, step);
    auto row = std::lower_bound(set.begin(), set.end(),
                                static_cast<int32_t>(chunk.first_element / width));
    for (; row != set.end() && *row * width < end; ++row) {
      const int64_t first = std::max(*row * width, chunk.first_element) - chunk.first_element;
      const int64_t last = std::min((*row + 1) * width, end) - 1 - chunk.first_element;
      std::fill(has_rows.begin() + first / kBlockElements,
                has_rows.begin() + last / kBlockElements + 1, 1);
    }
  }
  return has_rows;
}

// The embedding's gradient, made dense for one block: rows of each rank that lie in it, zero elsewhere.
template <class Element>
void ChunkUpdate::DenseRows(const Chunk& chunk, int64_t step, int64_t first_element,
                            std::vector<Element>* out) const {
  const ParameterUnit& unit = layout_->units()[chunk.unit];
  const int64_t width = unit.tensor(TensorRole::kEmbedding).shape[1];
  const int64_t begin = chunk.first_element + first_element;
  const int64_t end = begin + kBlockElements;
  out->assign(static_cast<size_t>(layout_->rank_count() * kBlockElements), Element{0});
  for (int rank = 0; rank < layout_->rank_count(); ++rank) {
    const SharedLayout::RowGradient rows = layout_->embedding_rows(rank);
    const std::span<const int32_t> set = RowSet(*layout_, *pools_, rank, step);
    const auto* values = reinterpret_cast<const Element*>(pools_->At(rows.region) +
                                                          rows.rows_offset_bytes);
    auto row = std::lower_bound(set.begin(), set.end(), static_cast<int32_t>(begin / width));
    for (; row != set.end() && *row * width < end; ++row) {
      const int64_t row_begin = *row * width;
      const int64_t copy_begin = std::max(begin, row_begin);
      const int64_t copy_end = std::min(end, row_begin + width);
      std::memcpy(out->data() + rank * kBlockElements + (copy_begin - begin),
                  values + (row - set.begin()) * width + (copy_begin - row_begin),
                  static_cast<size_t>(copy_end - copy_begin) * sizeof(Element));
    }
  }
}

template <class Visit>
void ChunkUpdate::ForRuns(int64_t chunk_index, int64_t step, int64_t first_block,
                          int64_t block_count, Scratch* scratch, const Visit& visit) const {
  const Chunk& chunk = layout_->chunks()[chunk_index];
  const bool rows = layout_->gradient_by_row(chunk.unit);
  const int ranks = rows ? layout_->rank_count() : layout_->partial_count();

  const auto blockwise = [&]<class Element>(Element, const auto& fill) {
    std::vector<Element>& dense = ScratchOf<Element>(scratch);
    std::array<const Element*, kMaxRanks> pointers;
    for (int64_t block = first_block; block < first_block + block_count; ++block) {
      fill(block, &dense);
      for (int rank = 0; rank < ranks; ++rank) {
        pointers[rank] = dense.data() + rank * kBlockElements;
      }
      visit(typename PartialsOf<Element>::Type{{pointers.data(), static_cast<size_t>(ranks)}},
            block, int64_t{1});
    }
  };
  const auto dense = [&]<class Element>(Element) {
    std::array<const Element*, kMaxRanks> pointers;
    for (int rank = 0; rank < ranks; ++rank) {
      pointers[rank] = reinterpret_cast<const Element*>(
                           pools_->At(layout_->gradient(chunk_index, rank, step))) +
                       first_block * kBlockElements;
    }
    visit(typename PartialsOf<Element>::Type{{pointers.data(), static_cast<size_t>(ranks)}},
          first_block, block_count);
  };

  if (rows) {
    const auto fill = [&]<class Element>(int64_t block, std::vector<Element>* out) {
      DenseRows(chunk, step, block * kBlockElements, out);
    };
    if (layout_->row_gradient_bytes() == 4) {
      blockwise(float{}, fill);
    } else {
      blockwise(uint16_t{}, fill);
    }
  } else if (round_accumulators_) {
    blockwise(uint16_t{}, [&](int64_t block, std::vector<uint16_t>* out) {
      out->resize(static_cast<size_t>(ranks * kBlockElements));
      for (int rank = 0; rank < ranks; ++rank) {
        const auto* partial = reinterpret_cast<const float*>(
                                  pools_->At(layout_->gradient(chunk_index, rank, step))) +
                              block * kBlockElements;
        RoundToBfloat16({partial, static_cast<size_t>(kBlockElements)},
                        out->data() + rank * kBlockElements);
      }
    });
  } else if (layout_->gradient_bytes() == 4) {
    dense(float{});
  } else {
    dense(uint16_t{});
  }
}

bool ChunkUpdate::Squares(int64_t chunk, int64_t step, int64_t first_block, std::span<double> out,
                          Scratch* scratch) const {
  bool finite = true;
  ForRuns(chunk, step, first_block, static_cast<int64_t>(out.size()), scratch,
          [&](const auto& partials, int64_t block, int64_t count) {
            finite = GradientSquares(level_, partials, count * kBlockElements,
                                     out.subspan(block - first_block, count)) &&
                     finite;
          });
  return finite;
}

void ChunkUpdate::Apply(int64_t chunk_index, int64_t step, int64_t first_block,
                        int64_t block_count, const AdamWScalars& decayed,
                        const AdamWScalars& plain, Scratch* scratch) const {
  const Chunk& chunk = layout_->chunks()[chunk_index];
  const std::vector<uint8_t>& is_decayed = block_decayed_[chunk.unit];
  const int64_t unit_block = chunk.first_element / kBlockElements;
  std::byte* weights = pools_->At(layout_->weights(chunk_index));
  std::byte* rest = pools_->At(layout_->rest(chunk_index));

  const auto update = [&](const auto& partials, int64_t block, int64_t count) {
    const AdamWScalars& scalars = is_decayed[unit_block + block] ? decayed : plain;
    std::byte* rest_here = rest + block * layout_->rest_block_bytes();
    const int64_t first = block * kBlockElements;
    const int64_t elements = count * kBlockElements;
    if constexpr (std::is_same_v<std::decay_t<decltype(partials)>, Float32Partials>) {
      if (layout_->float32()) {
        AdamWUpdate(level_, scalars, partials,
                    MasterState{reinterpret_cast<float*>(weights) + first, rest_here}, elements);
        return;
      }
    }
    AdamWUpdate(level_, scalars, partials,
                SplitState{reinterpret_cast<uint16_t*>(weights) + first, rest_here}, elements);
  };
  // Cut where decay changes: it is uniform in a block, not in a chunk.
  const int64_t end = first_block + block_count;
  for (int64_t begin = first_block; begin < end;) {
    int64_t run_end = begin + 1;
    while (run_end < end && is_decayed[unit_block + run_end] == is_decayed[unit_block + begin]) {
      ++run_end;
    }
    ForRuns(chunk_index, step, begin, run_end - begin, scratch, update);
    begin = run_end;
  }
}

}  // namespace oom
