#include "worker/buffer_arena.h"

#include <algorithm>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {

Result<std::unique_ptr<BufferArena>> BufferArena::Create(
    const std::vector<const StepGraph*>& graphs, DeviceAllocator* allocator) {
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
  OOM_ASSIGN_OR_RETURN(arena->base_, allocator->Allocate(arena->bytes_));
  return arena;
}

std::byte* BufferArena::At(const StepGraph& graph, int64_t buffer) const {
  const Buffer& wanted = graph.buffers[static_cast<size_t>(buffer)];
  if (wanted.bytes == 0) return nullptr;
  const auto found = offset_bytes_.find(wanted.name);
  OOM_CHECK(found != offset_bytes_.end());
  return base_ + found->second;
}

}  // namespace oom
