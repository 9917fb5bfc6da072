// Keeps two multiplying warpgroups of a block apart. Both take half of each tile and read the same
// stages, so left alone they finish together, and the tensor cores stand still while both write
// their sums. With a head start of some stages in its first tile, one writes while the other one
// has the tensor cores for itself, and by that falls behind again, tile after tile.

#pragma once

#include "runtime/kernels/hopper_barrier.cuh"

namespace oom::hopper {

template <int kStages>
class HeadStart {
 public:
  // `barrier` is a named barrier that nothing else uses; each warpgroup has an object of its own.
  __device__ HeadStart(int barrier, bool leads) : barrier_(barrier), leads_(leads) {}

  // Before the first stage of a tile that has some.
  __device__ __forceinline__ void BeforeTile() {
    if (leads_ || done_) return;
    __syncwarp();
    NamedBarrierSync(barrier_, kThreads);
    done_ = true;
  }

  // After stage number `stage` of a tile of `stages`.
  __device__ __forceinline__ void AfterStage(int stage, int stages) {
    if (!leads_ || done_ || stage + 1 < min(kStages, stages)) return;
    __syncwarp();
    NamedBarrierArrive(barrier_, kThreads);
    done_ = true;
  }

 private:
  static constexpr int kThreads = 2 * 128;

  const int barrier_;
  const bool leads_;
  bool done_ = false;
};

}  // namespace oom::hopper
