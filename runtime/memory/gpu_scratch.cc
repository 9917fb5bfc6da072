#include "runtime/memory/gpu_scratch.h"

#include <algorithm>

namespace oom {

GpuScratchBytes GpuScratchOf(const SharedLayout& layout, int rank) {
  GpuScratchBytes bytes;
  const SharedLayout::RowGradient rows = layout.embedding_rows(rank);
  const int64_t row_values_bytes = rows.region.bytes - rows.rows_offset_bytes;
  const bool reduces_rounded = layout.reduces_on_devices() &&
                               layout.reduction() == v1::GRADIENT_REDUCTION_DEVICE_BFLOAT16;
  for (const Chunk& chunk : layout.chunks()) {
    const bool embedding = layout.gradient_by_row(chunk.unit);
    if (layout.rank_count() > 1 && !layout.float32() && !embedding &&
        (reduces_rounded || chunk.owner_rank >= 0)) {
      bytes.exchanged =
          std::max(bytes.exchanged, chunk.elements * static_cast<int64_t>(sizeof(uint16_t)));
    }
    if (chunk.owner_rank >= 0 && embedding) {
      bytes.row_gradient =
          std::max(bytes.row_gradient, chunk.elements * layout.row_gradient_bytes());
      bytes.rows = row_values_bytes;
      bytes.row_numbers = 2 * rows.max_rows * static_cast<int64_t>(sizeof(int32_t));
    } else if (embedding) {
      bytes.partials = std::max(bytes.partials, row_values_bytes);
    } else if (chunk.owner_rank < 0 && layout.gradient_bytes() == 2) {
      bytes.partials = std::max(bytes.partials, chunk.elements * layout.gradient_bytes());
    }
  }
  bytes.decayed_blocks = layout.control_page().block_count;
  return bytes;
}

}  // namespace oom
