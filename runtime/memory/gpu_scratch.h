// What a GPU's data plane works in beside the plan's buffers, in its own memory. A function of the layout alone, so that
// the planner can account for it and the worker can take it.

#pragma once

#include <cstdint>

#include "runtime/memory/shm_layout.h"

namespace oom {

struct GpuScratchBytes {
  int64_t partials = 0;        // A streamed chunk's partial, rounded, or the embedding's rows.
  // Of a resident embedding: its gradient's rows, their numbers in two steps, and a chunk of it made dense.
  int64_t rows = 0;
  int64_t row_numbers = 0;
  int64_t row_gradient = 0;
  int64_t exchanged = 0;       // A chunk's partial, rounded, on its way to other ranks.
  int64_t decayed_blocks = 0;  // By block of the job.

  int64_t sum() const { return partials + rows + row_numbers + row_gradient + exchanged + decayed_blocks; }
};

GpuScratchBytes GpuScratchOf(const SharedLayout& layout, int rank);

}  // namespace oom
