#include "runtime/device/cuda_memory.h"

#include <algorithm>

#include "runtime/base/units.h"
#include "runtime/device/cuda_check.h"

namespace oom {
namespace {

// One call for hundreds of GiB fails on some drivers, and holds their locks for long.
constexpr auto kPieceBytes = static_cast<size_t>(kRegisteredPieceBytes);
constexpr size_t kPageBytes = 4096;

}  // namespace

Result<RegisteredMemory> RegisteredMemory::Register(std::span<std::byte> memory) {
  RegisteredMemory registered;
  for (size_t offset = 0; offset < memory.size(); offset += kPieceBytes) {
    const size_t bytes = std::min(kPieceBytes, memory.size() - offset);
    const size_t whole = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    void* piece = memory.data() + offset;
    const cudaError_t error =
        cudaHostRegister(piece, whole, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error == cudaErrorMemoryAllocation || error == cudaErrorNotSupported ||
        error == cudaErrorOperatingSystem) {
      static_cast<void>(cudaGetLastError());
      return Status(Code::kResourceExhausted,
                    "the driver cannot lock " + FormatBytes(static_cast<int64_t>(whole)) +
                        " of host memory (" + cudaGetErrorName(error) +
                        "); look at the limit of locked memory (ulimit -l, LimitMEMLOCK) and at the "
                        "container's memory limit")
          .WithReason("OUT_OF_HOST_MEMORY");
    }
    OOM_RETURN_IF_CUDA_ERROR(error, "cannot register host memory");
    registered.pieces_.push_back(piece);
  }
  return registered;
}

RegisteredMemory::~RegisteredMemory() {
  for (void* piece : pieces_) static_cast<void>(cudaHostUnregister(piece));
}

}  // namespace oom
