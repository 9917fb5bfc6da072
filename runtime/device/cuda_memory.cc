#include "runtime/device/cuda_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <string>

#include "runtime/base/units.h"
#include "runtime/device/cuda_check.h"

namespace oom {
namespace {

// One call for hundreds of GiB fails on some drivers, and holds their locks for long.
constexpr auto kPieceBytes = static_cast<size_t>(kRegisteredPieceBytes);
constexpr size_t kPageBytes = 4096;

// RLIMIT_MEMLOCK; -1: unlimited.
int64_t LockedMemoryLimitBytes() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
  return static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace

Status RegistrationStatus(cudaError_t error, int64_t bytes, int64_t locked_limit_bytes) {
  const std::string what = "cannot lock " + FormatBytes(bytes) + " of host memory for the GPU";
  if (error != cudaErrorMemoryAllocation && error != cudaErrorNotSupported &&
      error != cudaErrorOperatingSystem) {
    return CudaStatus(error, what);
  }
  // Not sticky: the next call must not see it.
  static_cast<void>(cudaGetLastError());
  const std::string limit = locked_limit_bytes < 0 ? "unlimited" : FormatBytes(locked_limit_bytes);
  return Status(Code::kResourceExhausted,
                what + " (" + cudaGetErrorName(error) + ", " + std::to_string(error) +
                    "): the limit of locked memory is " + limit +
                    " (ulimit -l; LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for a "
                    "container); the memory limit of the container or cgroup counts too "
                    "(memory.max); or lower budgets.host_memory")
      .WithReason("OUT_OF_HOST_MEMORY");
}

Result<RegisteredMemory> RegisteredMemory::Register(std::span<std::byte> memory) {
  RegisteredMemory registered;
  for (size_t offset = 0; offset < memory.size(); offset += kPieceBytes) {
    const size_t bytes = std::min(kPieceBytes, memory.size() - offset);
    const size_t whole = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    void* piece = memory.data() + offset;
    const cudaError_t error =
        cudaHostRegister(piece, whole, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error != cudaSuccess) {
      return RegistrationStatus(error, static_cast<int64_t>(whole), LockedMemoryLimitBytes());
    }
    registered.pieces_.push_back(piece);
  }
  return registered;
}

RegisteredMemory::~RegisteredMemory() {
  for (void* piece : pieces_) static_cast<void>(cudaHostUnregister(piece));
}

}  // namespace oom
