#include "runtime/device/cuda_check.h"

#include "runtime/device/cuda_error.h"

namespace oom {
namespace {

// "13.0" of 13000.
std::string VersionName(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string DriverAdvice() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return "no driver is loaded: install the NVIDIA driver, and let containers have the GPUs "
           "(--gpus all)";
  }
  return "the driver offers CUDA " + VersionName(driver) + ", this program needs " +
         VersionName(CUDART_VERSION) + ": install a newer driver";
}

// What whoever runs the job can do about an error that no bug of ours caused.
std::string Advice(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "end what else uses the GPU (nvidia-smi lists it), or set budgets.gpu_memory to less";
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorStubLibrary:
    case cudaErrorCompatNotSupportedOnDevice:
      return DriverAdvice();
    case cudaErrorSystemDriverMismatch:
      return "the driver was updated while it was loaded: reboot";
    case cudaErrorInvalidDevice:
      return "look at CUDA_VISIBLE_DEVICES of oomd, and restart it";
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceAlreadyInUse:
      return "another process has the GPU for itself: end it, or allow several (sudo nvidia-smi -c "
             "DEFAULT)";
    case cudaErrorSystemNotReady:
      return "start what connects the GPUs (sudo systemctl start nvidia-fabricmanager)";
    case cudaErrorNoKernelImageForDevice:
      return "the programs were not built for this generation of GPUs";
    case cudaErrorECCUncorrectable:
    case cudaErrorContained:
      return "its memory has lost bits: look at nvidia-smi -q -d ECC, and reset the GPU (sudo "
             "nvidia-smi --gpu-reset) if it "
             "comes again";
    case cudaErrorNvlinkUncorrectable:
      return "a link between GPUs failed: look at nvidia-smi nvlink -e";
    default:
      return "look for the GPU's XID (sudo dmesg | grep -i xid)";
  }
}

}  // namespace

Status CudaStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return Status::Ok();
  const std::string message = what + ": " + cudaGetErrorString(error) + " (" +
                              cudaGetErrorName(error) + ", " + std::to_string(error) + ")";
  if (IsWrongCall(error)) return Status(Code::kInternal, message).WithReason("INTERNAL");
  const std::string advised = message + "; " + Advice(error);
  switch (error) {
    case cudaErrorMemoryAllocation:
      // Not sticky: the next call must not see it.
      static_cast<void>(cudaGetLastError());
      return Status(Code::kResourceExhausted, advised).WithReason("OUT_OF_GPU_MEMORY");
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorStubLibrary:
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceAlreadyInUse:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorNoKernelImageForDevice:
      return Status(Code::kFailedPrecondition, advised).WithReason("NOT_ENOUGH_DEVICES");
    default:
      return Status(Code::kInternal, advised).WithReason("GPU_FAULT");
  }
}

}  // namespace oom
