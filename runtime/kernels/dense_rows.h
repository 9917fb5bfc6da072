// The rows of the embedding's gradient made dense for a range of the embedding (engine rules, section 8):
//   out[e - first] = row u's element, for each element e of rows row_U in [first, first + elements); else 0.
// Shapes: U rows of `width` elements, rising row numbers. No scratch.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct DenseRange {
  const int32_t* row_U = nullptr;  // Those rows alone that overlap the range.
  int64_t row_count = 0;
  int64_t width = 0;
  int64_t first = 0;               // Element of the embedding.
  int64_t elements = 0;
};

// BF16 values by their bits.
void DenseRows(const DenseRange& range, const uint16_t* values_UH, uint16_t* out,
               cudaStream_t stream);
void DenseRows(const DenseRange& range, const float* values_UH, float* out, cudaStream_t stream);

}  // namespace oom
