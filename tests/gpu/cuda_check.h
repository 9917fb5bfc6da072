// What every program here asks of CUDA: whether there is a device, and whether a call succeeded.

#pragma once

#include <cuda_runtime_api.h>

#include "runtime/base/check.h"

namespace oom::testing {

inline bool HasGpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

inline void CheckCuda(cudaError_t error) {
  OOM_CHECK_MSG(error == cudaSuccess, cudaGetErrorString(error));
}

}  // namespace oom::testing
