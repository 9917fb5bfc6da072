#include "runtime/ops/embedding.h"

#include <tuple>

#include "runtime/ops/device_operators.h"
#include "runtime/ops/precision.h"

namespace oom {

double EmbeddingScale(const ModelDescription& model, at::ScalarType type) {
  return at::scalar_tensor(model.embedding_scale, at::TensorOptions(type)).item<double>();
}

at::Tensor EmbeddingForward(const at::Tensor& weight_VH, const at::Tensor& token_T) {
  return weight_VH.index_select(0, token_T);
}

void EmbeddingBackward(const at::Tensor& dy_TH, const at::Tensor& token_T, at::Tensor dweight_VH) {
  dweight_VH.index_add_(0, token_T, dy_TH.to(dweight_VH.scalar_type()));
}

RowGradient EmbeddingBackwardByRow(const at::Tensor& dy_TH, const at::Tensor& token_T) {
  if (const DeviceOperators* device = OperatorsFor(dy_TH)) {
    return device->embedding_backward_by_row(dy_TH, token_T);
  }
  const auto [row_U, index_T, unused_counts] =
      at::_unique2(token_T, /*sorted=*/true, /*return_inverse=*/true);
  const at::Tensor wide_dy = Wide(dy_TH);
  at::Tensor sum_UH = at::zeros({row_U.size(0), dy_TH.size(1)}, wide_dy.options());
  sum_UH.index_add_(0, index_T, wide_dy);
  return {.row_U = row_U, .sum_UH = sum_UH};
}

}  // namespace oom
