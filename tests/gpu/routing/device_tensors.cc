#include "tests/gpu/routing/device_tensors.h"

#include <limits>
#include <tuple>

namespace oom::testing {
namespace {

at::Tensor EmptyAtOffset(at::IntArrayRef shape, at::ScalarType type, int64_t offset_elements) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return at::empty({elements + offset_elements}, OnDevice(type))
      .narrow(0, offset_elements, elements)
      .view(shape);
}

}  // namespace

at::TensorOptions OnDevice(at::ScalarType type) {
  return at::TensorOptions().device(at::kCUDA).dtype(type);
}

at::Tensor Random(at::IntArrayRef shape, uint64_t seed, at::ScalarType type) {
  at::manual_seed(seed);
  return at::randn(shape, OnDevice(at::kFloat)).to(type);
}

at::Tensor Poisoned(at::IntArrayRef shape, at::ScalarType type, int64_t offset_elements) {
  at::Tensor tensor = EmptyAtOffset(shape, type, offset_elements);
  if (at::isFloatingType(type)) {
    return tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return tensor.fill_(type == at::kByte ? 255 : -1);
}

at::Tensor AtOffset(const at::Tensor& tensor, int64_t offset_elements) {
  return EmptyAtOffset(tensor.sizes(), tensor.scalar_type(), offset_elements).copy_(tensor);
}

at::Tensor RandomChoices(int64_t tokens, int64_t choices, int64_t experts, uint64_t seed) {
  if (tokens == 0) return at::empty({0, choices}, OnDevice(at::kInt));
  const at::Tensor liking =
      at::arange(experts, OnDevice(at::kFloat)).mul_(-2.0 / static_cast<double>(experts));
  const at::Tensor score = Random({tokens, experts}, seed, at::kFloat).add_(liking);
  return std::get<1>(at::topk(score, choices, 1)).to(at::kInt).contiguous();
}

double RelativeError(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor a = actual.to(at::kCUDA, at::kDouble);
  const at::Tensor b = expected.to(at::kCUDA, at::kDouble);
  const double difference = at::sub(a, b).norm().item<double>();
  const double norm = b.norm().item<double>();
  if (!(difference >= 0.0)) return std::numeric_limits<double>::infinity();
  return difference == 0.0 ? 0.0 : difference / norm;
}

bool BitEqual(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.numel() == 0) return true;
  const at::Tensor x = a.to(at::kCPU).contiguous().view({-1}).view(at::kByte);
  const at::Tensor y = b.to(at::kCPU).contiguous().view({-1}).view(at::kByte);
  return at::equal(x, y);
}

}  // namespace oom::testing
