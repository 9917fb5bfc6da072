// DeviceAllocator gives out a device's plan-named memory, before the first step: nothing is returned before the object
// goes. One thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

class DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;
  // Zeroed. REQUIRES: bytes > 0. Fails with kResourceExhausted (numbers in it).
  virtual Result<std::byte*> Allocate(int64_t bytes) = 0;
};

// Of the CPU device: anonymous memory, touched at once, so that a step faults nothing of it.
class CpuAllocator : public DeviceAllocator {
 public:
  ~CpuAllocator() override;
  Result<std::byte*> Allocate(int64_t bytes) override;

 private:
  std::vector<std::span<std::byte>> mappings_;
};

}  // namespace oom
