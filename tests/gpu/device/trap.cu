#include "runtime/kernels/launch.h"
#include "tests/gpu/device/trap.h"

namespace oom::testing {
namespace {

__global__ void TrapKernel() { asm volatile("trap;"); }

}  // namespace

void Trap(cudaStream_t stream) {
  TrapKernel<<<1, 1, 0, stream>>>();
  CheckLaunch("Trap");
}

}  // namespace oom::testing
