// How much host memory this process may really use: the smallest limit of its cgroups (version 1 or
// 2, up the tree), then the machine. Reads /proc and /sys; thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/memory/numa.h"

namespace oom {

struct HostMemoryLimit {
  int64_t bytes = 0;
  // "cgroup memory.max", "cgroup memory.limit_in_bytes" or "machine".
  std::string source;
};

// `root` is put before "/proc" and "/sys", for tests. Fails with kInternal if /proc/meminfo is
// unreadable.
Result<HostMemoryLimit> ReadHostMemoryLimit(const std::string& root = "");

// What each node could give to pools: nine tenths of the limit (the rest is for processes, their
// heaps and the page cache), shared out in proportion to the nodes' memory. A value of `configured`
// (one for the node as a whole, or one for each NUMA node) lowers it, never raises it.
struct PoolCapacity {
  std::vector<int64_t> bytes_by_node;
  std::string source;  // Of the limit that acts: HostMemoryLimit::source or "configuration".
};
// Fails with kInvalidArgument if `configured` has neither 0, 1 nor node_count() values.
Result<PoolCapacity> ComputePoolCapacity(const NumaTopology& topology, const HostMemoryLimit& limit,
                                         const std::vector<int64_t>& configured);

// RLIMIT_MEMLOCK; -1: unlimited.
int64_t LockedMemoryLimitBytes();

}  // namespace oom
