// Which pages pools get on this machine, and the command that gives them larger ones. Locking a
// pool for a GPU and the optimizer's walk over it take the longer the more pages it has. Reads
// /sys; thread-safe. `root` is put before it, for tests.

#pragma once

#include <cstdint>
#include <string>

namespace oom {

struct HugepageState {
  // What CreatePool would give a small pool now: one of the constants of pool.h.
  std::string kind;
  // Empty, or the command for pages that are larger or more.
  std::string hint;
};

// For pools of `pool_bytes` in all. `allow_hugetlb`: as of PoolOptions.
HugepageState ExamineHugepages(int64_t pool_bytes, bool allow_hugetlb,
                               const std::string& root = "");

bool SharedMemoryUsesTransparentHugePages(const std::string& root = "");

// Free 2 MiB hugetlb pages of the machine, in bytes.
int64_t FreeHugetlbBytes(const std::string& root = "");

}  // namespace oom
