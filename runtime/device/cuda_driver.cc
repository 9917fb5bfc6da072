#include "runtime/device/cuda_driver.h"

#include <cuda.h>

namespace oom {
namespace {

using WriteValue64 = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

WriteValue64 FindWriteValue64() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuStreamWriteValue64", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WriteValue64>(function);
}

}  // namespace

cudaError_t StreamWriteValue(cudaStream_t stream, const void* word, uint64_t value) {
  static const WriteValue64 write = FindWriteValue64();
  if (write == nullptr) return cudaErrorInsufficientDriver;
  const CUresult result = write(stream, reinterpret_cast<CUdeviceptr>(word), value,
                                CU_STREAM_WRITE_VALUE_DEFAULT);
  // The runtime numbers its errors as the driver does.
  return static_cast<cudaError_t>(result);
}

}  // namespace oom
