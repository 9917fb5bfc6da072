#include "worker/buffer_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {

Result<std::unique_ptr<BufferArena>> BufferArena::Create(
    const std::vector<const StepGraph*>& graphs) {
  std::map<std::string, int64_t> sizes;
  for (const StepGraph* graph : graphs) {
    for (const Buffer& buffer : graph->buffers) {
      if (buffer.space != Space::kDevice || buffer.bytes == 0) continue;
      int64_t& size = sizes[buffer.name];
      size = std::max(size, buffer.bytes);
    }
  }
  std::unique_ptr<BufferArena> arena(new BufferArena());
  for (const auto& [name, size] : sizes) {
    arena->offset_bytes_[name] = arena->bytes_;
    arena->bytes_ += RoundUp(size, 4096);
  }
  if (arena->bytes_ == 0) return arena;
  void* base = ::mmap(nullptr, static_cast<size_t>(arena->bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return ErrnoStatus(errno, "cannot take " + FormatBytes(arena->bytes_) + " of device buffers");
  }
  arena->base_ = static_cast<std::byte*>(base);
  // Advice only: small pages work too.
  static_cast<void>(::madvise(base, static_cast<size_t>(arena->bytes_), MADV_HUGEPAGE));
  std::memset(base, 0, static_cast<size_t>(arena->bytes_));
  return arena;
}

BufferArena::~BufferArena() {
  if (base_ != nullptr) ::munmap(base_, static_cast<size_t>(bytes_));
}

std::byte* BufferArena::At(const StepGraph& graph, int64_t buffer) const {
  const Buffer& wanted = graph.buffers[static_cast<size_t>(buffer)];
  if (wanted.bytes == 0) return nullptr;
  const auto found = offset_bytes_.find(wanted.name);
  OOM_CHECK(found != offset_bytes_.end());
  return base_ + found->second;
}

}  // namespace oom
