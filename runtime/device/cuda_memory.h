// Host memory that the device reads and writes: page-locked and mapped, in pieces (kernels reference, section 7).
// Registered once; the destructor releases it. Thread-compatible.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

// A registration's piece: no single copy may cross from one into the next.
inline constexpr int64_t kRegisteredPieceBytes = int64_t{4} << 30;

class RegisteredMemory {
 public:
  // Whole pages from memory.data() on, so it must begin at one. The device uses the host's addresses.
  // Fails with kResourceExhausted (reason OUT_OF_HOST_MEMORY; names the limits to look at) or those of CudaStatus.
  static Result<RegisteredMemory> Register(std::span<std::byte> memory);

  RegisteredMemory() = default;
  RegisteredMemory(RegisteredMemory&& other) noexcept = default;
  RegisteredMemory& operator=(RegisteredMemory&& other) = delete;
  ~RegisteredMemory();

 private:
  std::vector<void*> pieces_;
};

}  // namespace oom
