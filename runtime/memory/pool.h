// Creation and mapping of a job's host memory pools: memfds sealed against shrinking and growing
// (so that no mapper ever gets SIGBUS), on 2 MiB hugetlb pages if the machine has enough of them
// free, else on transparent hugepages or 4 KiB pages, bound to a NUMA node. Creation touches no
// page: the job host's bound threads do, so that the job's cgroup is charged. PoolMapping is a
// move-only value; the functions are thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/memory/numa.h"

namespace oom {

inline constexpr const char* kHugetlbPages = "2MiB hugetlb";
inline constexpr const char* kTransparentHugePages = "transparent hugepages";
inline constexpr const char* kSmallPages = "4KiB";

struct PoolOptions {
  std::string name;  // Shown in /proc/<pid>/maps.
  int numa_node = 0;
  int64_t bytes = 0;
  bool allow_hugetlb = true;
};

struct CreatedPool {
  UniqueFd fd;            // Close-on-exec.
  int64_t bytes = 0;      // As asked; the file is rounded up to its page size.
  std::string page_kind;  // One of the constants above.
  bool bound = false;     // false: mbind is not permitted here, so placement is by first touch.
};

// REQUIRES: options.bytes > 0. Codes of ErrnoStatus.
Result<CreatedPool> CreatePool(NumaTopology& topology, const PoolOptions& options);

// A shared read-write mapping, unmapped once.
class PoolMapping {
 public:
  // Maps a pool's descriptor, which may be closed afterwards. `bytes` is what the pool was created
  // with. Fails with kInvalidArgument if the file is smaller or is not sealed, else with codes of
  // ErrnoStatus.
  static Result<PoolMapping> Map(int fd, int64_t bytes);

  PoolMapping() = default;
  PoolMapping(PoolMapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)),
        bytes_(other.bytes_),
        mapped_bytes_(other.mapped_bytes_) {}
  PoolMapping& operator=(PoolMapping&& other) noexcept;
  ~PoolMapping();

  std::span<std::byte> bytes() const { return {address_, static_cast<size_t>(bytes_)}; }
  std::byte* data() const { return address_; }
  int64_t size_bytes() const { return bytes_; }

 private:
  std::byte* address_ = nullptr;
  int64_t bytes_ = 0;
  int64_t mapped_bytes_ = 0;
};

}  // namespace oom
