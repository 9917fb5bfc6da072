// A library that the CUDA driver loads into a process (CUDA_INJECTION64_PATH names it): it counts
// the process's calls of the CUDA runtime and driver in the file $OOM_API_CALLS_FILE.PID. CUPTI is
// found at run time, beside torch's other libraries or among those that the process has loaded.

#include <cupti.h>
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "tests/gpu/api_calls/call_counts.h"

namespace oom::testing {
namespace {

constexpr auto kWriteInterval = std::chrono::milliseconds(20);

// Never destroyed: other threads call CUDA until the very end of the process.
CallCounts* counts = nullptr;

void CUPTIAPI OnCall(void*, CUpti_CallbackDomain domain, CUpti_CallbackId, const void* data) {
  if (domain != CUPTI_CB_DOMAIN_DRIVER_API && domain != CUPTI_CB_DOMAIN_RUNTIME_API) return;
  const auto& call = *static_cast<const CUpti_CallbackData*>(data);
  if (call.callbackSite == CUPTI_API_ENTER) counts->Add(call.functionName);
}

bool Fail(const std::string& what) {
  std::fprintf(stderr, "calls of CUDA are not counted: %s\n", what.c_str());
  return false;
}

bool Start(const std::string& path) {
  void* library = ::dlopen("libcupti.so.13", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return Fail(::dlerror());
  const auto subscribe =
      reinterpret_cast<decltype(&cuptiSubscribe)>(::dlsym(library, "cuptiSubscribe"));
  const auto enable =
      reinterpret_cast<decltype(&cuptiEnableDomain)>(::dlsym(library, "cuptiEnableDomain"));
  if (subscribe == nullptr || enable == nullptr) return Fail("libcupti lacks functions");
  counts = std::make_unique<CallCounts>(path).release();
  CUpti_SubscriberHandle subscriber = nullptr;
  for (const CUptiResult result :
       {subscribe(&subscriber, &OnCall, nullptr), enable(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API),
        enable(1, subscriber, CUPTI_CB_DOMAIN_RUNTIME_API)}) {
    if (result != CUPTI_SUCCESS) return Fail("CUPTI answers " + std::to_string(result));
  }
  if (!counts->Write()) return Fail("cannot write " + path);
  std::atexit([] { static_cast<void>(counts->Write()); });
  std::thread([] {
    while (counts->Write()) std::this_thread::sleep_for(kWriteInterval);
  }).detach();
  return true;
}

}  // namespace
}  // namespace oom::testing

// The driver calls it once; 0 says that the injection failed, and the process goes on.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  const char* file = std::getenv("OOM_API_CALLS_FILE");
  if (file == nullptr) return 0;
  return oom::testing::Start(std::string(file) + "." + std::to_string(::getpid())) ? 1 : 0;
}
