// oom-worker-cuda: a rank on a GPU.

#include <cstdlib>

#include "worker/worker_main.h"

int main(int argc, char** argv) {
  // Before CUDA starts: one hardware queue for each stream, so that none waits behind another's work.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  // One workspace a handle and stream: products repeat their bits.
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  // Segments that grow: what a step takes and gives back leaves no gaps behind.
  ::setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", /*overwrite=*/0);
  return oom::WorkerMain(argc, argv, [](const oom::internal::v1::WorkerStart& start) {
    return oom::MakeCudaDevice({.index = start.device(),
                                .memory_budget_bytes = start.spec().budgets().gpu_memory_bytes(),
                                .planned_bytes = start.plan().estimate().device_bytes_peak(),
                                .deterministic = start.plan().deterministic()});
  });
}
