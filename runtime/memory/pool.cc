#include "runtime/memory/pool.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "runtime/base/units.h"
#include "runtime/memory/hugepages.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace oom {
namespace {

// Kernels before 6.3 do not know MFD_NOEXEC_SEAL.
int MemfdCreate(const std::string& name, unsigned flags) {
  const int fd = memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create(name.c_str(), flags);
}

Result<CreatedPool> Create(NumaTopology& topology, const PoolOptions& options, bool hugetlb) {
  const unsigned flags =
      MFD_CLOEXEC | MFD_ALLOW_SEALING | (hugetlb ? MFD_HUGETLB | MFD_HUGE_2MB : 0U);
  CreatedPool pool;
  pool.fd = UniqueFd(MemfdCreate(options.name, flags));
  if (!pool.fd.valid()) return ErrnoStatus(errno, "memfd_create of pool " + options.name);
  pool.bytes = options.bytes;
  const int64_t file_bytes =
      RoundUp(options.bytes, hugetlb ? 2_MiB : static_cast<int64_t>(sysconf(_SC_PAGESIZE)));
  if (ftruncate(pool.fd.get(), file_bytes) != 0) {
    return ErrnoStatus(errno, "making pool " + options.name + " of " + FormatBytes(file_bytes));
  }
  if (fcntl(pool.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ErrnoStatus(errno, "sealing pool " + options.name);
  }
  // The NUMA policy and, for hugetlb, the reservation of the pages belong to the file: they stay
  // when this mapping goes.
  void* address = mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pool.fd.get(), 0);
  if (address == MAP_FAILED) return ErrnoStatus(errno, "mapping pool " + options.name);
  const Status bound = topology.BindMemory(address, file_bytes, options.numa_node);
  munmap(address, file_bytes);
  if (!bound.ok() && bound.code() != Code::kPermissionDenied) return bound;
  pool.bound = bound.ok();
  pool.page_kind = hugetlb                                  ? kHugetlbPages
                   : SharedMemoryUsesTransparentHugePages() ? kTransparentHugePages
                                                            : kSmallPages;
  return pool;
}

}  // namespace

Result<CreatedPool> CreatePool(NumaTopology& topology, const PoolOptions& options) {
  OOM_CHECK(options.bytes > 0);
  if (options.allow_hugetlb && FreeHugetlbBytes() >= RoundUp(options.bytes, 2_MiB)) {
    // Another process may take the pages first; then it is the fallback's turn.
    Result<CreatedPool> pool = Create(topology, options, /*hugetlb=*/true);
    if (pool.ok()) return pool;
  }
  return Create(topology, options, /*hugetlb=*/false);
}

Result<PoolMapping> PoolMapping::Map(int fd, int64_t bytes) {
  struct stat info = {};
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, "fstat of a pool");
  if (bytes <= 0 || info.st_size < bytes) {
    return Status(Code::kInvalidArgument, "a pool of " + std::to_string(bytes) +
                                              " bytes has a file of " +
                                              std::to_string(info.st_size) + " bytes");
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kInvalidArgument, "a pool's file is not sealed against shrinking");
  }
  void* address = mmap(nullptr, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return ErrnoStatus(errno, "mapping a pool of " + FormatBytes(bytes));
  // Refused for hugetlb files, which need no advice.
  madvise(address, info.st_size, MADV_HUGEPAGE);
  PoolMapping mapping;
  mapping.address_ = static_cast<std::byte*>(address);
  mapping.bytes_ = bytes;
  mapping.mapped_bytes_ = info.st_size;
  return mapping;
}

PoolMapping& PoolMapping::operator=(PoolMapping&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  return *this;
}

PoolMapping::~PoolMapping() {
  if (address_ != nullptr) munmap(address_, mapped_bytes_);
}

}  // namespace oom
