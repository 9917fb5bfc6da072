#include "runtime/ops/layer.h"

#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/precision.h"

namespace oom {

PackedBatch MakePackedBatch(std::vector<int64_t> cu_seqlens) {
  OOM_CHECK(!cu_seqlens.empty() && cu_seqlens.front() == 0);
  std::vector<at::Tensor> positions;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    OOM_CHECK(cu_seqlens[i] >= cu_seqlens[i - 1]);
    positions.push_back(at::arange(cu_seqlens[i] - cu_seqlens[i - 1], at::kLong));
  }
  return {.positions = positions.empty() ? at::empty({0}, at::kLong) : at::cat(positions),
          .cu_seqlens = std::move(cu_seqlens)};
}

int64_t MixerSaved::bytes() const {
  return TensorBytes(input_TH) + TensorBytes(query_TNd) + TensorBytes(key_TGd) +
         TensorBytes(value_TGd) + TensorBytes(attention.output_TNd) +
         TensorBytes(attention.logsumexp_TN);
}

int64_t MixtureSaved::bytes() const {
  return TensorBytes(input_TH) + TensorBytes(gate_up_RF) + router.bytes() + groups.bytes();
}

at::Tensor FinishMixer(const at::Tensor& residual_TH, const at::Tensor& sum_TH) {
  return at::add(sum_TH, residual_TH).to(residual_TH.scalar_type());
}

}  // namespace oom
