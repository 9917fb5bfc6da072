// Which errors of CUDA are bugs, and which say that the device is gone. Header-only, for kernels
// too.

#pragma once

#include <cuda_runtime_api.h>

namespace oom {

// Whether only a call that is wrong in itself gives this error: a size, a handle, a flag.
constexpr bool IsWrongCall(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidPitchValue:
    case cudaErrorInvalidSymbol:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorMissingConfiguration:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorIllegalState:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
    case cudaErrorCooperativeLaunchTooLarge:
    case cudaErrorNotPermitted:
    case cudaErrorInvalidClusterSize:
    case cudaErrorInvalidResourceType:
    case cudaErrorInvalidResourceConfiguration:
      return true;
    default:
      return false;
  }
}

// Whether this error stays: from it on the device answers every call of this process with it.
constexpr bool IsDeviceFault(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsRpcFailure:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace oom
