// Errors of the CUDA runtime as Status. What a GPU or its driver does wrong ends the attempt with a reason; a wrong
// call is a bug.

#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/base/check.h"
#include "runtime/base/status.h"

namespace oom {

// OK for cudaSuccess. kResourceExhausted with reason OUT_OF_GPU_MEMORY, kFailedPrecondition with reason
// NOT_ENOUGH_DEVICES (no driver, no device, device in use), else kInternal with reason GPU_FAULT.
Status CudaStatus(cudaError_t error, const std::string& what);

}  // namespace oom

#define OOM_RETURN_IF_CUDA_ERROR(call, what)                              \
  do {                                                                    \
    if (const cudaError_t oom_cuda_error = (call); oom_cuda_error != cudaSuccess) { \
      return ::oom::CudaStatus(oom_cuda_error, what);                     \
    }                                                                     \
  } while (false)

// Of calls that fail only by a bug or after the device has failed (the error is sticky then, and is reported by the
// next call that can).
#define OOM_CUDA_CHECK(call)                                                          \
  do {                                                                                \
    const cudaError_t oom_cuda_error = (call);                                        \
    OOM_CHECK_MSG(oom_cuda_error == cudaSuccess, cudaGetErrorString(oom_cuda_error)); \
  } while (false)
