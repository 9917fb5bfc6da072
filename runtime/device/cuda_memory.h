// Host memory that the device reads and writes: page-locked and mapped, in pieces (kernels reference, section 7).
// Registered once; the destructor releases it. Thread-compatible.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

// A registration's piece: no single copy may cross from one into the next.
inline constexpr int64_t kRegisteredPieceBytes = int64_t{4} << 30;

// What Register fails with. A driver that was refused the memory: kResourceExhausted,
// OUT_OF_HOST_MEMORY, with the limit of locked memory (bytes; -1: none) and the settings to look
// at. Else CudaStatus.
Status RegistrationStatus(cudaError_t error, int64_t bytes, int64_t locked_limit_bytes);

class RegisteredMemory {
 public:
  // Whole pages from memory.data() on, so it must begin at one. The device uses the host's
  // addresses. Fails with RegistrationStatus.
  static Result<RegisteredMemory> Register(std::span<std::byte> memory);

  RegisteredMemory() = default;
  RegisteredMemory(RegisteredMemory&& other) noexcept = default;
  RegisteredMemory& operator=(RegisteredMemory&& other) = delete;
  ~RegisteredMemory();

 private:
  std::vector<void*> pieces_;
};

}  // namespace oom
