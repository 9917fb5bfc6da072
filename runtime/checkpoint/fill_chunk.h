// Fills a range of a chunk's canonical state from a StateSource: by the job host for streamed chunks, by the
// owner for resident ones. Thread-safe on disjoint ranges.

#pragma once

#include <cstdint>

#include "runtime/base/status.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/state_source.h"

namespace oom {

// Elements [first, first + elements) of the chunk, whole blocks; padding becomes zero. `weights` and `rest`: where the
// chunk's own are. Fails with the codes of StateSource::Read.
Status FillChunk(const StateSource& source, const SharedLayout& layout, int64_t chunk,
                 int64_t first_element, int64_t elements, std::byte* weights, std::byte* rest);

}  // namespace oom
