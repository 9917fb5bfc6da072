// The GPUs that this daemon may give to jobs, as the driver's management library describes them. The library is found
// at run time: oomd starts, links and runs without a driver, and never makes a CUDA context.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace oom {

struct Gpu {
  int index = 0;           // As CUDA numbers the visible ones.
  std::string name;        // "NVIDIA H200"
  std::string uuid;
  int64_t memory_bytes = 0;
  int64_t free_bytes = 0;  // When it was asked.
  int numa_node = 0;
};

struct GpuInventory {
  std::vector<Gpu> gpus;
  // Empty, or why there are none or fewer than the machine has, and what to do about it.
  std::string problem;
  bool has_driver = false;
};

// CUDA_VISIBLE_DEVICES (numbers or UUIDs) selects and orders, as it does for CUDA. May wait for the
// driver: while a process locks memory for a GPU, for many seconds.
GpuInventory FindGpus();

}  // namespace oom
