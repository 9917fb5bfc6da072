#include "tests/gpu/delta_net/delta_net_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <limits>

namespace oom::testing {
namespace {

class Precision : public ::testing::Environment {
 public:
  void SetUp() override {
    // As the worker has it.
    at::globalContext().setAllowBF16ReductionCuBLAS(false, /*allow_splitk=*/true);
  }
};

const auto* const kPrecision = ::testing::AddGlobalTestEnvironment(new Precision);

}  // namespace

at::Tensor Unwritten(at::IntArrayRef shape, at::ScalarType type) {
  return at::full(shape, std::numeric_limits<double>::quiet_NaN(),
                  at::TensorOptions(at::kCUDA).dtype(type));
}

at::Tensor UnwrittenBytes(int64_t bytes) {
  return at::full({bytes}, 255, at::TensorOptions(at::kCUDA).dtype(at::kByte));
}

at::Tensor OnGpu(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(at::kCUDA).contiguous() : tensor;
}

at::Tensor ToTruth(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(at::TensorOptions(at::kCPU).dtype(at::kDouble)) : tensor;
}

void ExpectNoWorse(const std::string& what, const at::Tensor& kernel, const at::Tensor& composite,
                   const at::Tensor& exact, double factor, double bar) {
  ASSERT_EQ(kernel.sizes(), exact.sizes()) << what;
  const double of_kernel = RelativeError(ToTruth(kernel), exact);
  const double of_composite = RelativeError(ToTruth(composite), exact);
  std::printf("  %-24s error %.2e, composite %.2e\n", what.c_str(), of_kernel, of_composite);
  // Written so that NaN fails.
  EXPECT_TRUE(of_kernel <= std::max(bar, factor * of_composite))
      << what << ": error " << of_kernel << " against the composite's " << of_composite;
}

void ExpectBitEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                    const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined()) continue;
    EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", result " << i;
  }
}

}  // namespace oom::testing
