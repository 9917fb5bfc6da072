// What the tests of the delta net's kernels share: tensors on the GPU that show what was not
// written, and the measure of error against FP64.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/ops/ops_testing.h"

namespace oom::testing {

// Filled with NaN.
at::Tensor Unwritten(at::IntArrayRef shape, at::ScalarType type);

// Bytes that are NaN as any floating-point type.
at::Tensor UnwrittenBytes(int64_t bytes);

at::Tensor OnGpu(const at::Tensor& tensor);
at::Tensor ToTruth(const at::Tensor& tensor);  // FP64 on the CPU.

// The relative error of sums in FP32, and the root mean square of that of rounding to BF16 (2^-8 /
// 3^(1/2) over the mean significand), which a few numbers' own may miss by far.
inline constexpr double kFloatError = 1e-6;
inline constexpr double kBfloat16Error = 1.6e-3;

// Prints both errors against `exact` and fails if the kernel's is above both `factor` times the
// composite's and `bar`. NaN fails.
void ExpectNoWorse(const std::string& what, const at::Tensor& kernel, const at::Tensor& composite,
                   const at::Tensor& exact, double factor, double bar = kFloatError);

void ExpectBitEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                    const std::string& what);

}  // namespace oom::testing
