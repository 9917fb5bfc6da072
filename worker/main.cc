// oom-worker: a rank on a CPU device. (oom-worker-cuda is the one on a GPU; this one loads no CUDA library.)

#include "worker/device_memory.h"
#include "worker/worker_main.h"

int main(int argc, char** argv) {
  oom::InstallCountingAllocator();
  return oom::WorkerMain(argc, argv, [](const auto&) { return oom::MakeCpuDevice(); });
}
