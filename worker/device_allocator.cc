#include "worker/device_allocator.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "runtime/base/units.h"

namespace oom {

CpuAllocator::~CpuAllocator() {
  for (const std::span<std::byte> mapping : mappings_) ::munmap(mapping.data(), mapping.size());
}

Result<std::byte*> CpuAllocator::Allocate(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* base = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return ErrnoStatus(errno, "cannot take " + FormatBytes(bytes) + " of device buffers");
  }
  // Advice only: small pages work too.
  static_cast<void>(::madvise(base, size, MADV_HUGEPAGE));
  std::memset(base, 0, size);
  mappings_.emplace_back(static_cast<std::byte*>(base), size);
  return static_cast<std::byte*>(base);
}

}  // namespace oom
