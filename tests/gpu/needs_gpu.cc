#include "tests/gpu/needs_gpu.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/gpu/cuda_check.h"

namespace oom::testing {
namespace {

class NeedsGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!HasGpu()) SkipProgram("skipped: no CUDA device");
  }
};

const auto* const kNeedsGpu = ::testing::AddGlobalTestEnvironment(new NeedsGpu);

}  // namespace

void SkipProgram(const char* reason) {
  std::puts(reason);
  std::fflush(stdout);
  std::_Exit(77);
}

}  // namespace oom::testing
