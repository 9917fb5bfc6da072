// Goal: each call of the driver and the runtime is counted once, under its name and its thread's,
// also in a process that is killed. Method: the library as the driver loads it, in a child process,
// against a CUPTI that makes the calls asked for.

#include <cupti.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

namespace oom::testing {
namespace {

using FakeCall = void (*)(int domain, const char* function);

// In the child: the injection, then `work`. It ends by SIGKILL if `work` returns true, else as
// programs do.
pid_t Inject(const std::string& file, const std::function<bool(FakeCall)>& work) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::setenv("OOM_API_CALLS_FILE", file.c_str(), 1);
  void* cupti = ::dlopen(OOM_FAKE_CUPTI, RTLD_NOW);
  void* library = ::dlopen(OOM_API_CALLS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (cupti == nullptr || library == nullptr) ::_exit(3);
  const auto initialize = reinterpret_cast<int (*)()>(::dlsym(library, "InitializeInjection"));
  const auto call = reinterpret_cast<FakeCall>(::dlsym(cupti, "FakeCall"));
  if (initialize == nullptr || call == nullptr || initialize() != 1) ::_exit(4);
  if (work(call)) ::kill(::getpid(), SIGKILL);
  std::exit(0);
}

std::string CountsOf(const std::string& file, pid_t pid) {
  std::ifstream stream(file + "." + std::to_string(pid));
  std::stringstream text;
  text << stream.rdbuf();
  return text.str();
}

class InjectionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "api-calls-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string file() const { return folder_ + "/calls"; }

  std::string folder_;
};

TEST_F(InjectionTest, CallsAreCountedOnceByFunctionAndThread) {
  const pid_t pid = Inject(file(), [](FakeCall call) {
    ::pthread_setname_np(::pthread_self(), "compute");
    for (int i = 0; i < 3; ++i) call(CUPTI_CB_DOMAIN_DRIVER_API, "cuLaunchKernel");
    call(CUPTI_CB_DOMAIN_RUNTIME_API, "cudaMemcpyAsync_v3020");
    call(CUPTI_CB_DOMAIN_RESOURCE, "not a call");
    std::thread([call] {
      ::pthread_setname_np(::pthread_self(), "two words");
      call(CUPTI_CB_DOMAIN_DRIVER_API, "cuLaunchKernel");
    }).join();
    return false;
  });
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(
      CountsOf(file(), pid),
      "cuLaunchKernel 3 compute\ncuLaunchKernel 1 two words\ncudaMemcpyAsync_v3020 1 compute\n");
}

TEST_F(InjectionTest, AKilledProcessLeavesItsCounts) {
  const pid_t pid = Inject(file(), [this](FakeCall call) {
    ::pthread_setname_np(::pthread_self(), "compute");
    call(CUPTI_CB_DOMAIN_DRIVER_API, "cuMemAlloc_v2");
    const std::string all = "cuMemAlloc_v2 1 compute\n";
    while (CountsOf(file(), ::getpid()) != all) std::this_thread::yield();
    return true;
  });
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  EXPECT_EQ(CountsOf(file(), pid), "cuMemAlloc_v2 1 compute\n");
}

}  // namespace
}  // namespace oom::testing
