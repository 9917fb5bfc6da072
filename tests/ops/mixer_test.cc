// Goal: the mixer's backward is the derivative of its forward for every family; head groups add up
// to the whole; what replay saves is what the forward saved.

#include <gtest/gtest.h>

#include "runtime/ops/layer.h"
#include "tests/ops/reference.h"

namespace oom::testing {
namespace {

const std::vector<int64_t> kDocuments = {0, 7, 8, 21, 34};

TEST(MixerTest, BackwardIsTheDerivativeOfForward) {
  for (const auto& [name, model] : SmallModels()) {
    const PackedBatch batch = MakePackedBatch(kDocuments);
    const LayerTensors leaves = Leaves(RandomLayer(model, model.layer(0), 100));
    const at::Tensor x = Random({34, model.hidden_size}, 1).requires_grad_();
    const at::Tensor dy = Random({34, model.hidden_size}, 2);
    const at::Tensor y = ReferenceMixer(model, model.layer(0), leaves, x, batch);

    MixerSaved saved;
    LayerTensors gradients = ZeroGradients(leaves);
    LayerTensors weights;
    for (const auto& [field_name, field] : LayerFields()) {
      if ((leaves.*field).defined()) weights.*field = (leaves.*field).detach();
    }
    ExpectNear(MixerForward(model, model.layer(0), weights, x.detach(), batch, &saved), y, 1e-12,
               name + " y");
    const at::Tensor dx =
        MixerBackward(model, model.layer(0), weights, dy, saved, batch, &gradients);
    ExpectNear(dx, Autograd(y, dy, {x})[0], 1e-11, name + " dx");
    for (const auto& [field_name, field] : LayerFields()) {
      if (!(leaves.*field).defined()) continue;
      ExpectNear(gradients.*field, Autograd(y, dy, {leaves.*field})[0], 1e-11,
                 name + " " + field_name);
    }
  }
}

TEST(MixerTest, HeadGroupsAddUpToTheWholeWithinFp32Rounding) {
  for (const auto& [name, model] : SmallModels()) {
    const PackedBatch batch = MakePackedBatch(kDocuments);
    const LayerTensors weights = RandomLayer(model, model.layer(0), 200, at::kFloat);
    const at::Tensor x = Random({34, model.hidden_size}, 3, at::kFloat);
    const at::Tensor dy = Random({34, model.hidden_size}, 4, at::kFloat);
    MixerSaved whole;
    LayerTensors whole_gradients = ZeroGradients(weights);
    const at::Tensor y = MixerForward(model, model.layer(0), weights, x, batch, &whole);
    const at::Tensor dx =
        MixerBackward(model, model.layer(0), weights, dy, whole, batch, &whole_gradients);

    at::Tensor sum = at::zeros_like(x), dsum = at::zeros_like(x), output;
    LayerTensors gradients = ZeroGradients(weights);
    std::vector<MixerSaved> parts(2);
    int64_t part_bytes = 0;
    for (const int64_t group : {0, 1}) {
      MixerSaved& part = parts[static_cast<size_t>(group)];
      sum.add_(MixerForward(model, model.layer(0), weights, x, batch, &part,
                            {.first = 3 * group, .count = 3}));
      part_bytes += part.bytes() - static_cast<int64_t>(x.nbytes());
    }
    ExpectNear(FinishMixer(model, weights, x, sum, &output), y, 1e-6, name + " y");
    EXPECT_EQ(output.defined(), model.branch_norms) << name;
    const at::Tensor doutput = BeginMixerBackward(model, weights, dy, output, &gradients);
    for (const MixerSaved& part : parts) {
      dsum.add_(MixerBackward(model, model.layer(0), weights, doutput, part, batch, &gradients));
    }
    ExpectNear(AddResidual(dy, dsum), dx, 1e-6, name + " dx");
    ExpectNear(gradients, whole_gradients, 1e-6, name);
    part_bytes += output.defined() ? static_cast<int64_t>(output.nbytes()) : 0;
    EXPECT_EQ(part_bytes, whole.bytes() - static_cast<int64_t>(x.nbytes())) << name;
  }
}

TEST(MixerTest, AHeadGroupLeavesTheOtherHeadsGradientsAlone) {
  const ModelDescription model = SmallModels()[0].model;
  const PackedBatch batch = MakePackedBatch(kDocuments);
  const LayerTensors weights = RandomLayer(model, model.layer(0), 300);
  const at::Tensor x = Random({34, model.hidden_size}, 5);
  MixerSaved saved;
  MixerForward(model, model.layer(0), weights, x, batch, &saved, {.first = 3, .count = 3});
  LayerTensors gradients = ZeroGradients(weights);
  MixerBackward(model, model.layer(0), weights, x, saved, batch, &gradients);
  EXPECT_EQ(gradients.query.narrow(0, 0, 24).abs().max().item<double>(), 0.0);
  EXPECT_EQ(gradients.key.narrow(0, 0, 8).abs().max().item<double>(), 0.0);
  EXPECT_EQ(gradients.output.narrow(1, 0, 24).abs().max().item<double>(), 0.0);
  EXPECT_GT(gradients.query.narrow(0, 24, 24).abs().min().item<double>(), 0.0);
}

TEST(MixerTest, PackedDocumentsEqualDocumentsRunAlone) {
  for (const auto& [name, model] : SmallModels()) {
    const LayerTensors weights = RandomLayer(model, model.layer(0), 400);
    const at::Tensor x = Random({34, model.hidden_size}, 6);
    const at::Tensor packed =
        MixerForward(model, model.layer(0), weights, x, MakePackedBatch(kDocuments), nullptr);
    for (size_t i = 1; i < kDocuments.size(); ++i) {
      const int64_t length = kDocuments[i] - kDocuments[i - 1];
      const at::Tensor alone =
          MixerForward(model, model.layer(0), weights, x.narrow(0, kDocuments[i - 1], length),
                       MakePackedBatch({0, length}), nullptr);
      ExpectNear(packed.narrow(0, kDocuments[i - 1], length), alone, 1e-13, name);
    }
  }
}

TEST(MixerTest, BackwardOfAReplayHasTheSameBits) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const auto& [name, model] : SmallModels()) {
      const PackedBatch batch = MakePackedBatch(kDocuments);
      const LayerTensors weights = RandomLayer(model, model.layer(0), 500, type);
      const at::Tensor x = Random({34, model.hidden_size}, 7, type);
      const at::Tensor dy = Random({34, model.hidden_size}, 8, type);
      MixerSaved kept, replayed;
      const at::Tensor y = MixerForward(model, model.layer(0), weights, x, batch, &kept);
      EXPECT_TRUE(BitEqual(y, MixerForward(model, model.layer(0), weights, x, batch, nullptr)))
          << name;
      LayerTensors from_kept = ZeroGradients(weights), from_replay = ZeroGradients(weights);
      const at::Tensor dx =
          MixerBackward(model, model.layer(0), weights, dy, kept, batch, &from_kept);
      EXPECT_TRUE(
          BitEqual(y, MixerForward(model, model.layer(0), weights, x.clone(), batch, &replayed)))
          << name;
      EXPECT_TRUE(BitEqual(
          dx, MixerBackward(model, model.layer(0), weights, dy, replayed, batch, &from_replay)));
      EXPECT_TRUE(BitEqual(from_kept, from_replay)) << name;
    }
  }
}

}  // namespace
}  // namespace oom::testing
