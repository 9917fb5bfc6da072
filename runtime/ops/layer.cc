#include "runtime/ops/layer.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/device_operators.h"
#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"

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

PackedBatch PartOfBatch(const PackedBatch& batch, int64_t first, int64_t tokens) {
  const std::vector<int64_t>& starts = batch.cu_seqlens;
  if (first == 0 && tokens == starts.back()) return batch;
  // Empty documents at the borders belong to no part.
  const auto begin = std::upper_bound(starts.begin(), starts.end(), first) - 1;
  const auto end = std::lower_bound(starts.begin(), starts.end(), first + tokens);
  OOM_CHECK_MSG(*begin == first && end != starts.end() && *end == first + tokens,
                "a part of the batch has whole documents");
  PackedBatch part;
  part.positions = batch.positions.narrow(0, first, tokens);
  part.document_starts =
      batch.document_starts.narrow(0, begin - starts.begin(), end - begin + 1).sub(first);
  for (auto start = begin; start <= end; ++start) {
    part.cu_seqlens.push_back(*start - first);
    if (start > begin) part.longest = std::max(part.longest, *start - *(start - 1));
  }
  return part;
}

void ClearUnwrittenExperts(LayerTensors* gradients) {
  if (!std::exchange(gradients->experts_unwritten, false)) return;
  gradients->gate_up.zero_();
  gradients->down.zero_();
}

int64_t MixerSaved::bytes() const {
  return TensorBytes(input_TH) + TensorBytes(query_TNr) + TensorBytes(key_TGd) +
         TensorBytes(value_TGd) + TensorBytes(attention.output_TNd) +
         TensorBytes(attention.logsumexp_TN) + TensorBytes(output_TH);
}

int64_t DeltaMixerSaved::bytes() const { return TensorBytes(input_TH) + core.bytes(); }

int64_t MixtureSaved::bytes() const {
  return TensorBytes(input_TH) + TensorBytes(gate_up_RF) + router.bytes() + groups.bytes() +
         shared.bytes();
}

at::Tensor FinishMixer(const ModelDescription& model, const LayerTensors& weights,
                       const at::Tensor& x_TH, const at::Tensor& sum_TH, at::Tensor* output_TH) {
  if (!model.branch_norms) return AddResidual(x_TH, sum_TH);
  if (const DeviceOperators* device = OperatorsFor(x_TH)) {
    return device->finish_mixer(model, weights, x_TH, sum_TH, output_TH);
  }
  const at::Tensor output = sum_TH.to(x_TH.scalar_type());
  if (output_TH != nullptr) *output_TH = output;
  return RmsNormForward(output, weights.mixer_output_norm, model.norm).add_(x_TH);
}

at::Tensor BeginMixerBackward(const ModelDescription& model, const LayerTensors& weights,
                              const at::Tensor& dh_TH, const at::Tensor& output_TH,
                              LayerTensors* gradients) {
  if (!model.branch_norms) return dh_TH;
  if (const DeviceOperators* device = OperatorsFor(dh_TH)) {
    return device->begin_mixer_backward(model, weights, dh_TH, output_TH, gradients);
  }
  return RmsNormBackward(dh_TH, output_TH, weights.mixer_output_norm, model.norm,
                         gradients->mixer_output_norm)
      .to(dh_TH.scalar_type());
}

at::Tensor RowsOf(const at::Tensor& x_TH, TokenRange tokens) {
  return tokens.count < 0 ? x_TH : x_TH.narrow(0, tokens.first, tokens.count);
}

at::Tensor AddResidual(const at::Tensor& residual_TH, const at::Tensor& sum_TH) {
  return at::add(sum_TH, residual_TH).to(residual_TH.scalar_type());
}

}  // namespace oom
