// Sums of exponentials below a base (exponential.cuh), joined over a warp, a block and a cluster of
// blocks; each sum has one order. Device code, internal to this folder.

#pragma once

#include <cmath>

#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/packed.cuh"

namespace oom::internal {

// A sum of exponentials below a base; nothing yet: {-infinity, 0}.
struct Exponentials {
  float base;
  float sum;
};
__device__ inline Exponentials NoExponentials() { return {.base = -INFINITY, .sum = 0.0f}; }

// What may be subtracted: where every x is -infinity so far, exp(x - 0) is 0 as it should be.
__device__ inline float Finite(float base) { return base == -INFINITY ? 0.0f : base; }

// Over the warp; every lane gets the same bits.
template <class T>
__device__ Exponentials JoinLanes(Exponentials x) {
  const float own = x.base;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x.base = fmaxf(x.base, __shfl_xor_sync(0xFFFFFFFFu, x.base, offset));
  }
  // Not contracted with the first addition: the lane that gives and the one that takes would
  // differ.
  x.sum = SumOverLanes<32>(__fmul_rn(x.sum, Rebase<T>(own, Finite(x.base))));
  return x;
}

// Over the block, valid in its first warp. Every warp has its entry in `by_warp`.
template <class T>
__device__ Exponentials JoinBlock(Exponentials x, Exponentials* by_warp) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = JoinLanes<T>(x);
  if (lane == 0) by_warp[warp] = x;
  __syncthreads();
  if (warp != 0) return x;
  return JoinLanes<T>(lane < blockDim.x / 32 ? by_warp[lane] : NoExponentials());
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline void ArriveAtCluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void WaitForCluster() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The value at this shared address in block `rank` of the cluster.
__device__ inline Exponentials ReadFromCluster(const Exponentials* own, unsigned rank) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(own));
  Exponentials x;
  asm volatile(
      "{\n\t.reg .u32 there;\n\t"
      "mapa.shared::cluster.u32 there, %2, %3;\n\t"
      "ld.shared::cluster.v2.f32 {%0, %1}, [there];\n\t}"
      : "=f"(x.base), "=f"(x.sum)
      : "r"(address), "r"(rank)
      : "memory");
  return x;
}
#else
// Never called: clusters are launched on 9.0 and later only.
__device__ inline void ArriveAtCluster() {}
__device__ inline void WaitForCluster() {}
__device__ inline Exponentials ReadFromCluster(const Exponentials* own, unsigned) { return *own; }
#endif

}  // namespace oom::internal
