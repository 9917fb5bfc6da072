// The driver functions that the runtime library does not offer, found at run time: nothing links libcuda, so programs
// start on machines without a driver.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

// The stream stores `value` at `word` (mapped host memory) once everything before it is done and visible to the host.
cudaError_t StreamWriteValue(cudaStream_t stream, const void* word, uint64_t value);

}  // namespace oom
