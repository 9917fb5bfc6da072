// Goal: whoever reads why a job stopped learns which error of CUDA it was, whose fault, and what to
// change. Method: errors as CUDA returns them; no GPU is touched.

#include "runtime/device/cuda_error.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/base/units.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_faults.h"
#include "runtime/device/cuda_memory.h"

namespace oom {
namespace {

struct Case {
  cudaError_t error;
  Code code;
  const char* reason;
  const char* advice;
};

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(CudaStatusTest, EachErrorHasItsCodeReasonNumberAndAdvice) {
  const std::vector<Case> cases = {
      {cudaErrorMemoryAllocation, Code::kResourceExhausted, "OUT_OF_GPU_MEMORY",
       "budgets.gpu_memory"},
      {cudaErrorNoDevice, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES", "driver"},
      {cudaErrorInsufficientDriver, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES", "driver"},
      {cudaErrorCallRequiresNewerDriver, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES", "driver"},
      {cudaErrorSystemDriverMismatch, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES", "reboot"},
      {cudaErrorInvalidDevice, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES",
       "CUDA_VISIBLE_DEVICES"},
      {cudaErrorDevicesUnavailable, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES",
       "nvidia-smi -c DEFAULT"},
      {cudaErrorSystemNotReady, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES",
       "nvidia-fabricmanager"},
      {cudaErrorNoKernelImageForDevice, Code::kFailedPrecondition, "NOT_ENOUGH_DEVICES",
       "generation"},
      {cudaErrorECCUncorrectable, Code::kInternal, "GPU_FAULT", "--gpu-reset"},
      {cudaErrorContained, Code::kInternal, "GPU_FAULT", "--gpu-reset"},
      {cudaErrorNvlinkUncorrectable, Code::kInternal, "GPU_FAULT", "nvlink"},
      {cudaErrorLaunchFailure, Code::kInternal, "GPU_FAULT", "xid"},
      {cudaErrorIllegalAddress, Code::kInternal, "GPU_FAULT", "xid"},
      {cudaErrorLaunchTimeout, Code::kInternal, "GPU_FAULT", "xid"},
      {cudaErrorHardwareStackError, Code::kInternal, "GPU_FAULT", "xid"},
      {cudaErrorUnknown, Code::kInternal, "GPU_FAULT", "xid"},
      {cudaErrorInvalidValue, Code::kInternal, "INTERNAL", ""},
      {cudaErrorHostMemoryAlreadyRegistered, Code::kInternal, "INTERNAL", ""},
  };
  for (const Case& c : cases) {
    const Status status = CudaStatus(c.error, "the thing tried");
    const std::string name = cudaGetErrorName(c.error);
    EXPECT_EQ(status.code(), c.code) << name;
    EXPECT_EQ(status.reason(), c.reason) << name;
    EXPECT_TRUE(status.message().starts_with("the thing tried: ")) << status.message();
    EXPECT_TRUE(Has(status.message(), "(" + name + ", " + std::to_string(c.error) + ")"))
        << status.message();
    EXPECT_TRUE(Has(status.message(), c.advice)) << status.message();
  }
  EXPECT_TRUE(CudaStatus(cudaSuccess, "nothing").ok());
}

TEST(RegistrationTest, ARefusalNamesTheLimitOfLockedMemoryAndTheSetting) {
  for (const cudaError_t error :
       {cudaErrorMemoryAllocation, cudaErrorNotSupported, cudaErrorOperatingSystem}) {
    const Status status = RegistrationStatus(error, 4_GiB, 64_KiB);
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_EQ(status.reason(), "OUT_OF_HOST_MEMORY");
    for (const std::string part :
         {"4.00 GiB", "the limit of locked memory is 64.0 KiB", "LimitMEMLOCK=infinity",
          "--ulimit memlock=-1", "memory.max", "budgets.host_memory", cudaGetErrorName(error)}) {
      EXPECT_TRUE(Has(status.message(), part)) << part << " in " << status.message();
    }
  }
  EXPECT_TRUE(Has(RegistrationStatus(cudaErrorMemoryAllocation, 1, -1).message(), "is unlimited"));
  // What has nothing to do with limits does not speak of them.
  EXPECT_EQ(RegistrationStatus(cudaErrorECCUncorrectable, 1, 0).reason(), "GPU_FAULT");
  EXPECT_EQ(RegistrationStatus(cudaErrorHostMemoryAlreadyRegistered, 1, 0).reason(), "INTERNAL");
}

TEST(CudaFaultsTest, TheFirstFailureIsToldOnce) {
  CudaFaults faults;
  std::vector<Status> told;
  faults.Listen([&told](const Status& status) { told.push_back(status); });
  faults.Note(cudaSuccess, "fine");
  EXPECT_TRUE(told.empty());
  faults.Note(cudaErrorECCUncorrectable, "the first");
  faults.Note(cudaErrorLaunchFailure, "the second");
  // A handle that was never made because the device had failed.
  faults.Note(cudaErrorInvalidResourceHandle, "the third");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].reason(), "GPU_FAULT");
  EXPECT_TRUE(Has(told[0].message(), "the first")) << told[0].message();
}

TEST(CudaFaultsTest, WhoListensLateIsTold) {
  CudaFaults faults;
  faults.Note(cudaErrorLaunchFailure, "early");
  int count = 0;
  faults.Listen([&count](const Status&) { ++count; });
  EXPECT_EQ(count, 1);
}

TEST(CudaFaultsDeathTest, AWrongCallIsABug) {
  CudaFaults faults;
  EXPECT_DEATH(faults.Note(cudaErrorInvalidValue, "a size"), "invalid argument");
}

// A refused launch that is neither must end the process: nothing would report it later.
TEST(CudaErrorTest, AFaultIsNoWrongCallAndWhatPassesIsNeither) {
  for (const cudaError_t error :
       {cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorContained,
        cudaErrorIllegalAddress, cudaErrorLaunchTimeout, cudaErrorAssert,
        cudaErrorHardwareStackError, cudaErrorIllegalInstruction, cudaErrorMisalignedAddress,
        cudaErrorInvalidAddressSpace, cudaErrorInvalidPc, cudaErrorLaunchFailure,
        cudaErrorUnknown}) {
    EXPECT_TRUE(IsDeviceFault(error)) << cudaGetErrorName(error);
    EXPECT_FALSE(IsWrongCall(error)) << cudaGetErrorName(error);
    EXPECT_EQ(CudaStatus(error, "").reason(), "GPU_FAULT") << cudaGetErrorName(error);
  }
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorNoKernelImageForDevice,
                                  cudaErrorInsufficientDriver, cudaErrorNotReady, cudaSuccess}) {
    EXPECT_FALSE(IsDeviceFault(error)) << cudaGetErrorName(error);
    EXPECT_FALSE(IsWrongCall(error)) << cudaGetErrorName(error);
  }
}

}  // namespace
}  // namespace oom
