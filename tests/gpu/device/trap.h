// A kernel that stops the GPU's work for this process, as a fault of the hardware would.

#pragma once

#include <cuda_runtime_api.h>

namespace oom::testing {

void Trap(cudaStream_t stream);

}  // namespace oom::testing
