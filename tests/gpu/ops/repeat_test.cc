// Goal: on the GPU a replay gives what was kept, bit for bit; in deterministic mode so does every
// run of a layer; nothing waits for the device.

#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "tests/gpu/ops/cuda_ops_testing.h"

namespace oom::testing {
namespace {

struct LayerResult {
  at::Tensor y;
  at::Tensor dx;
  LayerTensors gradients;
};

struct LayerCase {
  LayerCase(const ModelDescription& model, const LayerDescription& layer,
            const std::vector<int64_t>& cu_seqlens)
      : model(model),
        layer(layer),
        weights(Moved(RandomLayer(model, layer, 40, at::kBFloat16), Gpu().options)),
        batch(OnGpu(MakePackedBatch(cu_seqlens))),
        x(Gpu()(Random({kTokens, model.hidden_size}, 1))),
        dy(Gpu()(Random({kTokens, model.hidden_size}, 2))),
        zeros(ZeroGradients(weights)) {}

  // With `replay`, backward has what a second forward saved.
  LayerResult Run(bool replay) const {
    LayerResult result;
    for (const auto& [name, field] : LayerFields()) {
      if ((zeros.*field).defined()) result.gradients.*field = (zeros.*field).clone();
    }
    RouterStats stats;
    MixerSaved mixer;
    MixtureSaved mixture;
    at::Tensor h =
        MixerForward(model, model.layer(0), weights, x, batch, replay ? nullptr : &mixer);
    result.y =
        MixtureForward(model, layer, weights, h, replay ? nullptr : &mixture, {.stats = &stats});
    if (replay) {
      h = MixerForward(model, model.layer(0), weights, x, batch, &mixer);
      MixtureForward(model, layer, weights, h, &mixture, {.stop_at_gate_up = true});
    }
    const LoadBalanceTerm balance =
        HasExperts(layer.mixture) ? MakeLoadBalanceTerm(stats, 0.1) : LoadBalanceTerm{};
    const at::Tensor dh =
        MixtureBackward(model, layer, weights, dy, mixture, &result.gradients, balance);
    result.dx = MixerBackward(model, model.layer(0), weights, dh, mixer, batch, &result.gradients);
    return result;
  }

  const ModelDescription model;
  const LayerDescription layer;
  const LayerTensors weights;
  const PackedBatch batch;
  const at::Tensor x;
  const at::Tensor dy;
  const LayerTensors zeros;
};

std::vector<LayerCase> Cases() {
  std::vector<LayerCase> cases;
  for (const NamedModel& named : SmallCudaModels()) {
    for (const auto& [name, cu_seqlens] : Batches()) {
      cases.emplace_back(named.model, named.model.layer(0), cu_seqlens);
    }
  }
  const ModelDescription dense = SmallCudaModels()[0].model;
  cases.emplace_back(dense, LayerWith(dense, MixtureKind::kDense), Batches()[1].second);
  return cases;
}

TEST(RepeatTest, InDeterministicModeARunOrAReplayHasTheSameBits) {
  const DeterministicMode deterministic;
  for (const LayerCase& c : Cases()) {
    const LayerResult first = c.Run(/*replay=*/false);
    EXPECT_TRUE(first.dx.isfinite().all().item<bool>());
    for (const bool replay : {false, true, false}) {
      const LayerResult again = c.Run(replay);
      EXPECT_TRUE(BitEqual(first.y, again.y));
      EXPECT_TRUE(BitEqual(first.dx, again.dx));
      EXPECT_TRUE(BitEqual(first.gradients, again.gradients));
    }
  }
}

// LibTorch throws where one of its functions would wait.
TEST(RepeatTest, NothingWaitsForTheDevice) {
  const std::vector<LayerCase> cases = Cases();
  const ModelDescription& model = cases[0].model;
  ModelDescription capped = model;
  capped.logit_cap = 30.0;
  const HeadTensors head = {.final_norm = cases[0].weights.input_norm,
                            .head = Gpu()(Random({model.vocabulary_size, model.hidden_size}, 3))};
  HeadTensors gradients = {.final_norm = cases[0].zeros.input_norm.clone(),
                           .head = at::zeros_like(head.head, at::kFloat)};
  const at::Tensor target = at::arange(kTokens, at::TensorOptions(at::kLong)).to(at::kCUDA);
  const at::Tensor tokens = target.to(at::kInt);
  const auto run = [&] {
    for (const LayerCase& c : cases) c.Run(/*replay=*/true);
    for (const ModelDescription& of : {model, capped}) {
      HeadLoss(of, head, cases[0].x, target, {.chunk_tokens = 100}, &gradients);
      HeadLoss(of, head, cases[0].x, target, {.chunk_tokens = 100}, nullptr);
    }
    EmbeddingBackwardByRow(cases[0].dy, tokens);
  };
  run();  // Libraries start and plans are compiled.
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  EXPECT_NO_THROW(run());
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
}

}  // namespace
}  // namespace oom::testing
