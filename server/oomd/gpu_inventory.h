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
  int numa_node = 0;
};

// Empty without a driver or GPUs. CUDA_VISIBLE_DEVICES (numbers or UUIDs) selects and orders, as it does for CUDA.
std::vector<Gpu> FindGpus();

}  // namespace oom
