// Goal: the GPU's Gated DeltaNet mixer is as near to FP64 as the composite in BF16, whole and by
// segments that documents cross, forward and both of two backwards whose gradients accumulate; one
// whose heads no kernel takes is the composite's there; nothing waits for the device.

#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/ops/delta_mixer.h"
#include "tests/gpu/ops/cuda_ops_testing.h"
#include "tests/ops/delta_net_reference.h"

namespace oom::testing {
namespace {

struct DeltaCase {
  ModelDescription model;
  std::vector<int64_t> cu_seqlens;
  int64_t segment_tokens = kTokens;
  uint64_t seed = 0;
};

GatedDeltaNetTensors Moved(const GatedDeltaNetTensors& tensors, const Setting& setting) {
  GatedDeltaNetTensors moved;
  for (const auto& [name, field] : DeltaNetFields()) moved.*field = setting(tensors.*field);
  return moved;
}

struct DeltaResult {
  at::Tensor h;
  at::Tensor dx;
  at::Tensor second_dx;
  LayerTensors gradients;
};

// Weights and inputs where and as `setting` has them.
class DeltaRun {
 public:
  DeltaRun(const DeltaCase& c, const Setting& setting)
      : model_(c.model),
        setting_(setting),
        seed_(100 * c.seed),
        batch_(MakePackedBatch(c.cu_seqlens)) {
    if (setting.gpu()) batch_ = OnGpu(std::move(batch_));
    const DeltaNetDescription& delta = model_.layer(0).delta_net;
    const GatedDeltaNetShape shape{.key_heads = delta.key_head_count,
                                   .value_heads = delta.value_head_count,
                                   .key_size = delta.key_head_size,
                                   .value_size = delta.value_head_size};
    weights_.input_norm =
        setting(Random({model_.hidden_size}, seed_ + 60).mul_(0.2).to(at::kBFloat16));
    weights_.delta_net =
        Moved(RandomDeltaNet(shape, model_.hidden_size, delta.tap_count, seed_ + 61, at::kBFloat16),
              setting);
    x_ = RowsOf(1);
    for (int64_t first = 0; first < kTokens; first += c.segment_tokens) {
      segments_.push_back(CutSegment(batch_.cu_seqlens, batch_.document_starts, first,
                                     std::min(first + c.segment_tokens, kTokens)));
    }
  }

  DeltaResult Run() const {
    DeltaResult result;
    result.gradients.input_norm = ZerosOf(weights_.input_norm);
    result.gradients.delta_net = ZeroGradients(weights_.delta_net);
    std::vector<DeltaMixerSaved> saved(segments_.size());
    std::vector<at::Tensor> h;
    GatedDeltaNetState state;
    for (size_t i = 0; i < segments_.size(); ++i) {
      DeltaMixerOutput output =
          DeltaMixerForward(model_, model_.layer(0), weights_, x_, segments_[i], state, &saved[i]);
      h.push_back(output.h_TH);
      state = output.state;
    }
    result.h = at::cat(h);
    result.dx = Backward(saved, 2, &result.gradients);
    result.second_dx = Backward(saved, 3, &result.gradients);
    return result;
  }

 private:
  at::Tensor RowsOf(uint64_t seed) const {
    return setting_(Random({kTokens, model_.hidden_size}, seed_ + seed, at::kBFloat16));
  }

  static at::Tensor ZerosOf(const at::Tensor& weight) {
    const bool exact = weight.scalar_type() == at::kDouble;
    return at::zeros(weight.sizes(), weight.options().dtype(exact ? at::kDouble : at::kFloat));
  }

  at::Tensor Backward(const std::vector<DeltaMixerSaved>& saved, uint64_t seed,
                      LayerTensors* gradients) const {
    const at::Tensor dh = RowsOf(seed);
    std::vector<at::Tensor> dx(saved.size());
    GatedDeltaNetState dstate;
    for (size_t i = saved.size(); i-- > 0;) {
      DeltaMixerGradients of_part =
          DeltaMixerBackward(model_, model_.layer(0), weights_, dh, dstate, saved[i], gradients);
      dx[i] = of_part.x_TH;
      dstate = of_part.state;
    }
    return at::cat(dx);
  }

  const ModelDescription model_;
  const Setting setting_;
  const uint64_t seed_;
  PackedBatch batch_;
  LayerTensors weights_;
  at::Tensor x_;
  std::vector<SequenceSegment> segments_;
};

void Compare(const std::string& name, DeltaCase c) {
  constexpr uint64_t kSeeds = 6;  // The gradients of A_log and dt_bias have an element a head.
  Comparison comparison(name);
  for (c.seed = 0; c.seed < kSeeds; ++c.seed) {
    const auto run = [&](const Setting& setting) { return DeltaRun(c, setting).Run(); };
    const DeltaResult gpu = run(Gpu()), composite = run(Composite()), exact = run(Exact());
    comparison.Add("h", gpu.h, composite.h, exact.h);
    comparison.Add("dx", gpu.dx, composite.dx, exact.dx);
    comparison.Add("second dx", gpu.second_dx, composite.second_dx, exact.second_dx);
    comparison.Add("dinput_norm", gpu.gradients.input_norm, composite.gradients.input_norm,
                   exact.gradients.input_norm);
    for (const auto& [field_name, field] : DeltaNetFields()) {
      comparison.Add("d" + field_name, gpu.gradients.delta_net.*field,
                     composite.gradients.delta_net.*field, exact.gradients.delta_net.*field);
    }
  }
}

TEST(DeltaMixerCudaTest, IsAsNearToTheTruthAsTheComposite) {
  for (const auto& [batch, cu_seqlens] : Batches()) {
    // Segments of whole chunks, and such as cut chunks.
    for (const int64_t segment : {kTokens, int64_t{128}, int64_t{100}}) {
      Compare(batch + ", segments of " + std::to_string(segment),
              {SmallDeltaModel(), cu_seqlens, segment});
    }
  }
}

TEST(DeltaMixerCudaTest, HeadsThatNoKernelTakesAreTheComposites) {
  ModelDescription model = SmallDeltaModel();
  model.layers[0].delta_net.key_head_size = 16;
  model.layers[0].delta_net.value_head_size = 24;
  Compare("heads of 16 and 24", {model, Batches()[1].second, 128});
}

TEST(DeltaMixerCudaTest, EveryRunHasTheSameBits) {
  const DeterministicMode deterministic;
  for (const auto& [batch, cu_seqlens] : Batches()) {
    const DeltaRun run({SmallDeltaModel(), cu_seqlens, 128}, Gpu());
    const DeltaResult first = run.Run(), again = run.Run();
    EXPECT_TRUE(BitEqual(first.h, again.h) && BitEqual(first.second_dx, again.second_dx)) << batch;
    for (const auto& [name, field] : DeltaNetFields()) {
      EXPECT_TRUE(BitEqual(first.gradients.delta_net.*field, again.gradients.delta_net.*field))
          << batch << " " << name;
    }
  }
}

// LibTorch throws where one of its functions would wait.
TEST(DeltaMixerCudaTest, NothingWaitsForTheDevice) {
  const ModelDescription model = SmallDeltaModel();
  const LayerDescription& layer = model.layer(0);
  const PackedBatch batch = OnGpu(MakePackedBatch(Batches()[1].second));
  LayerTensors weights, gradients;
  const Setting gpu = Gpu();
  weights.input_norm = gpu(Random({model.hidden_size}, 60));
  weights.delta_net =
      Moved(RandomDeltaNet({.key_heads = 2, .value_heads = 4, .key_size = 128, .value_size = 128},
                           model.hidden_size, 4, 61),
            gpu);
  gradients.input_norm = at::zeros_like(weights.input_norm, at::kFloat);
  gradients.delta_net = ZeroGradients(weights.delta_net);
  const at::Tensor x = gpu(Random({kTokens, model.hidden_size}, 1));
  const auto run = [&] {
    GatedDeltaNetState state;
    std::vector<DeltaMixerSaved> saved(2);
    for (int64_t i = 0; i < 2; ++i) {
      const SequenceSegment segment = CutSegment(batch.cu_seqlens, batch.document_starts,
                                                 i * kTokens / 2, (i + 1) * kTokens / 2);
      state = DeltaMixerForward(model, layer, weights, x, segment, state,
                                &saved[static_cast<size_t>(i)])
                  .state;
    }
    GatedDeltaNetState dstate;
    for (size_t i = 2; i-- > 0;) {
      dstate = DeltaMixerBackward(model, layer, weights, x, dstate, saved[i], &gradients).state;
    }
  };
  run();  // Libraries start.
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  EXPECT_NO_THROW(run());
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
}

}  // namespace
}  // namespace oom::testing
