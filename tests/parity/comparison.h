// Errors of a run against a reference, tensor by tensor: ||a - b|| / ||b|| in FP64.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/parity/golden_case.h"

namespace oom::testing {

using ErrorsByName = std::map<std::string, double>;

// Infinite for a shape that differs, a NaN, or anything but zero where the reference is zero.
double RelativeError(const at::Tensor& actual, const at::Tensor& expected);

// Of every name in either; infinite for a name that one lacks.
ErrorsByName Compare(const TensorsByName& actual, const TensorsByName& expected);

// The names whose error is above the bar, with their errors in the message form "name (error)".
std::vector<std::string> Above(const ErrorsByName& errors, double bar);

double RootMeanSquare(const ErrorsByName& errors);

}  // namespace oom::testing
