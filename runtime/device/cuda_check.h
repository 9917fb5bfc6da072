// Errors of the CUDA runtime as Status. What a GPU or its driver does wrong ends the attempt with a reason; a wrong
// call is a bug.

#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/base/check.h"
#include "runtime/base/status.h"

namespace oom {

// OK for cudaSuccess. Else `what`, CUDA's words, name and number, and what to do about it.
// kResourceExhausted, OUT_OF_GPU_MEMORY: the device has no room.
// kFailedPrecondition, NOT_ENOUGH_DEVICES: no driver, one too old, no device, or others have it.
// kInternal, INTERNAL: a wrong call.
// kInternal, GPU_FAULT: everything else; the device, its driver or its links have failed.
Status CudaStatus(cudaError_t error, const std::string& what);

}  // namespace oom

#define OOM_RETURN_IF_CUDA_ERROR(call, what)                              \
  do {                                                                    \
    if (const cudaError_t oom_cuda_error = (call); oom_cuda_error != cudaSuccess) { \
      return ::oom::CudaStatus(oom_cuda_error, what);                     \
    }                                                                     \
  } while (false)

// Of calls before the first step that fail only by a bug.
#define OOM_CUDA_CHECK(call)                                                          \
  do {                                                                                \
    const cudaError_t oom_cuda_error = (call);                                        \
    OOM_CHECK_MSG(oom_cuda_error == cudaSuccess, cudaGetErrorString(oom_cuda_error)); \
  } while (false)
