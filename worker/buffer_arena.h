// BufferArena holds a worker's plan-named device buffers (parameter windows, gradient buffers, boundary
// buffers), taken once before the first step: anonymous memory, touched at once, so that a step
// allocates and faults nothing of it. Immutable after Create; thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/graph/step_graph.h"

namespace oom {

class BufferArena {
 public:
  // Graphs of one job share buffers of the same name. Fails with kResourceExhausted (numbers in it).
  static Result<std::unique_ptr<BufferArena>> Create(const std::vector<const StepGraph*>& graphs);
  ~BufferArena();
  BufferArena(const BufferArena&) = delete;
  BufferArena& operator=(const BufferArena&) = delete;

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
