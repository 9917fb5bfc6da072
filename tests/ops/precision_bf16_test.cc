// Goal: with BF16 activations, parameter gradients are FP32 sums of unrounded products, so many
// small contributions are not lost; and the whole layer stays within BF16 rounding of its FP32
// self.

#include <gtest/gtest.h>

#include "runtime/ops/layer.h"
#include "runtime/ops/precision.h"
#include "tests/ops/ops_testing.h"

namespace oom::testing {
namespace {

TEST(PrecisionTest, ASmallGradientIsNotLostInALargeSum) {
  at::Tensor gradient = at::full({1, 1}, 1024.0f);
  const at::Tensor small = at::full({1, 1}, 0.01, at::kBFloat16);
  const at::Tensor one = at::ones({1, 1}, at::kBFloat16);
  for (int i = 0; i < 1000; ++i) AccumulateWeightGradient(gradient, small, one);
  EXPECT_NEAR(gradient.item<float>(), 1024.0f + 1000 * small.item<float>(), 0.1f);
}

TEST(PrecisionTest, Bf16LayerStaysWithinRoundingOfTheSameLayerInFp32) {
  for (const NamedModel& named : SmallModels()) {
    const ModelDescription& model = named.model;
    const LayerDescription layer =
        LayerWith(model, MixtureKind::kDense);  // Routing may flip; a dense layer may not.
    const PackedBatch batch = MakePackedBatch({0, 13, 40});
    const LayerTensors narrow = RandomLayer(model, layer, 1, at::kBFloat16);
    LayerTensors wide;
    for (const auto& [name, field] : LayerFields()) {
      if ((narrow.*field).defined()) wide.*field = (narrow.*field).to(at::kFloat);
    }
    const at::Tensor x = Random({40, model.hidden_size}, 2, at::kBFloat16);
    const at::Tensor dy = Random({40, model.hidden_size}, 3, at::kBFloat16);
    const auto run = [&](const LayerTensors& weights, at::ScalarType type,
                         LayerTensors* gradients) {
      MixerSaved mixer;
      MixtureSaved mixture;
      const at::Tensor h = MixerForward(model, layer, weights, x.to(type), batch, &mixer);
      const at::Tensor y = MixtureForward(model, layer, weights, h, &mixture);
      const at::Tensor dh = MixtureBackward(model, layer, weights, dy.to(type), mixture, gradients);
      const at::Tensor dx = MixerBackward(model, layer, weights, dh, mixer, batch, gradients);
      EXPECT_EQ(y.scalar_type(), type);
      EXPECT_EQ(dx.scalar_type(), type);
      return std::make_pair(y, dx);
    };
    LayerTensors narrow_gradients = ZeroGradients(narrow), wide_gradients = ZeroGradients(wide);
    const auto [y, dx] = run(narrow, at::kBFloat16, &narrow_gradients);
    const auto [wide_y, wide_dx] = run(wide, at::kFloat, &wide_gradients);
    ExpectNear(y, wide_y, 0.02, named.name + " y");
    ExpectNear(dx, wide_dx, 0.02, named.name + " dx");
    ExpectNear(narrow_gradients, wide_gradients, 0.03, named.name);
  }
}

}  // namespace
}  // namespace oom::testing
