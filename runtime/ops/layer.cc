#include "runtime/ops/layer.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/precision.h"

namespace oom {

PackedBatch MakePackedBatch(std::vector<int64_t> cu_seqlens) {
  OOM_CHECK(!cu_seqlens.empty() && cu_seqlens.front() == 0);
  std::vector<int64_t> positions;
  positions.reserve(static_cast<size_t>(cu_seqlens.back()));
  PackedBatch batch;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    const int64_t length = cu_seqlens[i] - cu_seqlens[i - 1];
    OOM_CHECK(length >= 0);
    for (int64_t position = 0; position < length; ++position) positions.push_back(position);
    batch.longest = std::max(batch.longest, length);
  }
  batch.positions = at::tensor(positions, at::kLong);
  batch.document_starts =
      at::tensor(std::vector<int32_t>(cu_seqlens.begin(), cu_seqlens.end()), at::kInt);
  batch.cu_seqlens = std::move(cu_seqlens);
  return batch;
}

int64_t MixerSaved::bytes() const {
  return TensorBytes(input_TH) + TensorBytes(query_TNr) + TensorBytes(key_TGd) +
         TensorBytes(value_TGd) + TensorBytes(attention.output_TNd) +
         TensorBytes(attention.logsumexp_TN);
}

int64_t DeltaMixerSaved::bytes() const { return TensorBytes(input_TH) + core.bytes(); }

int64_t MixtureSaved::bytes() const {
  return TensorBytes(input_TH) + TensorBytes(gate_up_RF) + router.bytes() + groups.bytes() +
         shared.bytes();
}

at::Tensor FinishMixer(const at::Tensor& residual_TH, const at::Tensor& sum_TH) {
  return at::add(sum_TH, residual_TH).to(residual_TH.scalar_type());
}

}  // namespace oom
