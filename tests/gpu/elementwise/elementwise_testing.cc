#include "tests/gpu/elementwise/elementwise_testing.h"

#include <algorithm>
#include <limits>

namespace oom::testing {

at::Tensor Random(at::IntArrayRef shape, uint64_t seed, at::ScalarType type) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kFloat)).to(at::kCUDA).to(type);
}

at::Tensor Unwritten(at::IntArrayRef shape, at::ScalarType type) {
  return at::full(shape, std::numeric_limits<double>::quiet_NaN(),
                  at::TensorOptions(at::kCUDA).dtype(type));
}

double RelativeError(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.numel() == 0) return 0.0;
  const at::Tensor wide = expected.to(at::kDouble);
  const double size = wide.norm().item<double>();
  const double error = actual.to(at::kDouble).sub_(wide).norm().item<double>();
  return size == 0.0 ? error : error / size;
}

bool BitEqual(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

void ExpectAsExactAs(const at::Tensor& composite, const at::Tensor& actual, const at::Tensor& exact,
                     const std::string& what) {
  ASSERT_EQ(actual.sizes(), exact.sizes()) << what;
  const double bar = std::max(kFloatBar, 1.2 * RelativeError(composite, exact));
  const double error = RelativeError(actual, exact);
  // Written so that NaN fails.
  EXPECT_TRUE(error <= bar) << what << ": relative error " << error << ", bar " << bar;
}

}  // namespace oom::testing
