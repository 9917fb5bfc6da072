// What every kernel's launcher ends with.

#pragma once

#include <cuda_runtime_api.h>

#include "runtime/base/check.h"
#include "runtime/device/cuda_error.h"

namespace oom {

// Aborts with `name` and CUDA's message if a launch on this thread was refused: a bad shape is a
// bug of the caller. What goes wrong while a kernel runs is reported by the stream, later; a device
// that has failed refuses every launch from then on, which is no bug.
inline void CheckLaunch(const char* name) {
  const cudaError_t error = cudaPeekAtLastError();
  if (error != cudaSuccess && !IsDeviceFault(error)) {
    internal::CheckFailed(__FILE__, __LINE__, name, cudaGetErrorString(error));
  }
}

}  // namespace oom
