#include "runtime/device/cuda_check.h"

namespace oom {

Status CudaStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return Status::Ok();
  const std::string message =
      what + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  switch (error) {
    case cudaErrorMemoryAllocation:
      // Not sticky: the next call must not see it.
      static_cast<void>(cudaGetLastError());
      return Status(Code::kResourceExhausted, message).WithReason("OUT_OF_GPU_MEMORY");
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorStubLibrary:
      return Status(Code::kFailedPrecondition, message).WithReason("NOT_ENOUGH_DEVICES");
    default:
      return Status(Code::kInternal, message).WithReason("GPU_FAULT");
  }
}

}  // namespace oom
