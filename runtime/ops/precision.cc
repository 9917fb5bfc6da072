#include "runtime/ops/precision.h"

namespace oom {

at::ScalarType WideType(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor Wide(const at::Tensor& tensor) { return tensor.to(WideType(tensor.scalar_type())); }

void AccumulateWeightGradient(at::Tensor gradient_OI, const at::Tensor& dy_RO,
                              const at::Tensor& x_RI) {
  const at::ScalarType type = gradient_OI.scalar_type();
  gradient_OI.addmm_(dy_RO.to(type).t(), x_RI.to(type));
}

void AddProduct(at::Tensor sum_RI, const at::Tensor& a_RO, const at::Tensor& b_OI) {
  if (sum_RI.scalar_type() == a_RO.scalar_type()) {
    sum_RI.addmm_(a_RO, b_OI);
  } else {
    sum_RI.add_(at::mm(a_RO, b_OI));
  }
}

int64_t TensorBytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

}  // namespace oom
