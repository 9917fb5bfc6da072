#include "runtime/ops/cuda/embedding_cuda.h"

#include <limits>

#include "runtime/kernels/embedding.h"
#include "runtime/ops/cuda/cuda_tensors.h"

namespace oom {

RowGradient CudaEmbeddingBackwardByRow(const at::Tensor& dy_TH, const at::Tensor& token_T) {
  const int64_t tokens = token_T.size(0);
  const at::Tensor token = token_T.to(at::kInt).contiguous();
  const at::TensorOptions index = token.options();
  const at::Tensor count = at::empty({1}, index);
  const at::Tensor first_U = at::empty({tokens}, index);
  const at::Tensor position_T = at::empty({tokens}, index);
  const at::Tensor frequent_count = at::empty({1}, index);
  const at::Tensor frequent = at::empty({FrequentRows(tokens)}, index);
  RowGradient result;
  result.row_U = at::empty({tokens}, index);
  const TokenGroups groups{.count = DeviceData<int32_t>(count),
                           .row_U = DeviceData<int32_t>(result.row_U),
                           .first_U = DeviceData<int32_t>(first_U),
                           .position_T = DeviceData<int32_t>(position_T),
                           .frequent_count = DeviceData<int32_t>(frequent_count),
                           .frequent = DeviceData<int32_t>(frequent)};
  const at::Tensor scratch = ScratchBytes(GroupTokensScratchBytes(tokens), token);
  GroupTokens(DeviceData<int32_t>(token), tokens, std::numeric_limits<int32_t>::max(), groups,
              scratch.data_ptr(), OperatorStream());

  result.sum_UH = at::empty({tokens, dy_TH.size(1)}, dy_TH.options().dtype(at::kFloat));
  EmbeddingBackwardByRow({.token_count = tokens, .hidden_size = dy_TH.size(1)},
                         DeviceData<__nv_bfloat16>(dy_TH), groups, DeviceData<float>(result.sum_UH),
                         OperatorStream());
  return result;
}

}  // namespace oom
