#include "runtime/kernels/dense_rows.h"

#include "runtime/kernels/launch.h"

namespace oom {
namespace {

constexpr int kThreads = 256;

// A block a row: rows are long and few.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    DenseRowsKernel(DenseRange range, const Element* __restrict__ values, Element* __restrict__ out) {
  const int64_t u = blockIdx.x;
  const int64_t begin = range.row_U[u] * range.width - range.first;
  for (int64_t i = threadIdx.x; i < range.width; i += kThreads) {
    const int64_t at = begin + i;
    if (at >= 0 && at < range.elements) out[at] = values[u * range.width + i];
  }
}

template <class Element>
void Launch(const DenseRange& range, const Element* values, Element* out, cudaStream_t stream) {
  static_cast<void>(
      cudaMemsetAsync(out, 0, static_cast<size_t>(range.elements) * sizeof(Element), stream));
  if (range.row_count > 0) {
    DenseRowsKernel<<<static_cast<unsigned>(range.row_count), kThreads, 0, stream>>>(range, values,
                                                                                      out);
  }
  CheckLaunch("DenseRows");
}

}  // namespace

void DenseRows(const DenseRange& range, const uint16_t* values_UH, uint16_t* out,
               cudaStream_t stream) {
  Launch(range, values_UH, out, stream);
}

void DenseRows(const DenseRange& range, const float* values_UH, float* out, cudaStream_t stream) {
  Launch(range, values_UH, out, stream);
}

}  // namespace oom
