#include "tests/parity/comparison.h"

#include <cmath>
#include <limits>
#include <sstream>

namespace oom::testing {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

double RelativeError(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes()) return kInfinite;
  const at::Tensor wide = expected.to(at::kDouble);
  const double difference = actual.to(at::kDouble).sub(wide).norm().item<double>();
  if (difference == 0.0) return 0.0;
  const double error = difference / wide.norm().item<double>();
  return std::isfinite(error) ? error : kInfinite;
}

ErrorsByName Compare(const TensorsByName& actual, const TensorsByName& expected) {
  ErrorsByName errors;
  for (const auto& [name, tensor] : actual) errors[name] = kInfinite;
  for (const auto& [name, tensor] : expected) {
    const auto found = actual.find(name);
    errors[name] = found == actual.end() ? kInfinite : RelativeError(found->second, tensor);
  }
  return errors;
}

std::vector<std::string> Above(const ErrorsByName& errors, double bar) {
  std::vector<std::string> names;
  for (const auto& [name, error] : errors) {
    if (error <= bar) continue;
    std::ostringstream message;
    message << name << " (" << error << ")";
    names.push_back(message.str());
  }
  return names;
}

double RootMeanSquare(const ErrorsByName& errors) {
  double sum = 0.0;
  for (const auto& [name, error] : errors) sum += error * error;
  return std::sqrt(sum / static_cast<double>(errors.size()));
}

}  // namespace oom::testing
