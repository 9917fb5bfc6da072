// BufferArena says where a worker's plan-named device buffers lie (parameter windows, gradient buffers, boundary
// buffers), in one piece of the device's memory that is taken before the first step. Immutable after Create;
// thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/graph/step_graph.h"
#include "worker/device_allocator.h"

namespace oom {

class BufferArena {
 public:
  // Graphs of one job share buffers of the same name. `allocator` must outlive the object. Its codes.
  static Result<std::unique_ptr<BufferArena>> Create(const std::vector<const StepGraph*>& graphs,
                                                     DeviceAllocator* allocator);

  // nullptr for a buffer without plan-named bytes. REQUIRES: `graph` was given to Create.
  std::byte* At(const StepGraph& graph, int64_t buffer) const;
  int64_t bytes() const { return bytes_; }

 private:
  BufferArena() = default;

  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  std::map<std::string, int64_t> offset_bytes_;
};

}  // namespace oom
