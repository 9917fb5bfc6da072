// Goal: FP32 on the GPU, which takes the composites, equals FP64 within rounding: a whole layer,
// the head and the embedding; in deterministic mode every run has the same bits.

#include <gtest/gtest.h>

#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "tests/gpu/ops/cuda_ops_testing.h"

namespace oom::testing {
namespace {

struct Result {
  std::vector<at::Tensor> tensors;
  LayerTensors gradients;
};

Result RunAll(const ModelDescription& model, const std::vector<int64_t>& cu_seqlens,
              const Setting& setting) {
  const LayerTensors layer = RandomLayer(model, model.layer(0), 50);
  const LayerTensors weights = Moved(layer, setting.options);
  PackedBatch batch = MakePackedBatch(cu_seqlens);
  if (setting.gpu()) batch = OnGpu(std::move(batch));
  const at::Tensor x = setting(Random({kTokens, model.hidden_size}, 1));
  // FP32 and FP64 choose the same experts here; the mixture's input is the mixer's.
  const at::Tensor h_input = setting(RowsOfClearChoice(model, layer, kTokens, 2));
  const at::Tensor dy = setting(Random({kTokens, model.hidden_size}, 3));
  const at::Tensor head = setting(Random({model.vocabulary_size, model.hidden_size}, 4).mul(0.2));
  const at::Tensor target = at::arange(kTokens).to(x.device());

  Result result;
  result.gradients = ZeroGradients(weights);
  MixerSaved mixer;
  MixtureSaved mixture;
  const at::Tensor h = MixerForward(model, model.layer(0), weights, x, batch, &mixer);
  const at::Tensor y = MixtureForward(model, model.layer(0), weights, h_input, &mixture);
  const at::Tensor dh = MixtureBackward(model, model.layer(0), weights, dy, mixture, &result.gradients);
  const at::Tensor dx =
      MixerBackward(model, model.layer(0), weights, dh, mixer, batch, &result.gradients);
  HeadTensors head_gradients = {.final_norm = at::zeros_like(weights.input_norm),
                                .head = at::zeros_like(head)};
  const HeadLossResult loss =
      HeadLoss(model, {.final_norm = weights.input_norm, .head = head}, x, target,
               {.gradient_scale = 0.01, .chunk_tokens = 100}, &head_gradients);
  const RowGradient rows = EmbeddingBackwardByRow(dy, target.remainder(50).to(at::kInt));
  result.tensors = {
      h, y, dh, dx, loss.dx_TH, loss.loss_sum, rows.sum_UH, rows.row_U, head_gradients.head};
  return result;
}

TEST(Float32CompositesTest, OnTheGpuEqualFp64WithinRounding) {
  const Setting gpu = {at::TensorOptions(at::kCUDA).dtype(at::kFloat)};
  for (const NamedModel& named : SmallCudaModels()) {
    for (const auto& [batch, cu_seqlens] : Batches()) {
      const Result actual = RunAll(named.model, cu_seqlens, gpu);
      const Result expected = RunAll(named.model, cu_seqlens, Exact());
      const std::string name = named.name + ", " + batch;
      for (size_t i = 0; i < expected.tensors.size(); ++i) {
        ExpectNear(actual.tensors[i].to(at::kCPU), expected.tensors[i], 1e-5,
                   name + " " + std::to_string(i));
      }
      ExpectNear(Moved(actual.gradients, at::TensorOptions(at::kCPU)), expected.gradients, 1e-5,
                 name);
    }
  }
}

TEST(Float32CompositesTest, InDeterministicModeEveryRunHasTheSameBits) {
  const DeterministicMode deterministic;
  const Setting gpu = {at::TensorOptions(at::kCUDA).dtype(at::kFloat)};
  for (const NamedModel& named : SmallCudaModels()) {
    for (const auto& [batch, cu_seqlens] : Batches()) {
      const Result first = RunAll(named.model, cu_seqlens, gpu);
      const Result again = RunAll(named.model, cu_seqlens, gpu);
      for (size_t i = 0; i < first.tensors.size(); ++i) {
        EXPECT_TRUE(BitEqual(first.tensors[i], again.tensors[i])) << named.name << " " << i;
      }
      EXPECT_TRUE(BitEqual(first.gradients, again.gradients)) << named.name;
    }
  }
}

}  // namespace
}  // namespace oom::testing
