// Goal: the GPU's Gated DeltaNet mixer is as near to FP64 as the composite in BF16: forward and
// both of two backwards whose gradients accumulate, with and without states, two and four value
// heads a key head. Method: the composite on the CPU in FP64 and in BF16.

#include "runtime/ops/cuda/gated_delta_net_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/gpu/delta_net/delta_net_testing.h"
#include "tests/ops/delta_net_reference.h"

namespace oom::testing {
namespace {

constexpr int64_t kHidden = 192, kTaps = 4;

struct Result {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;

  void Add(const std::string& name, const at::Tensor& tensor) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
};

// The whole batch as one segment on the GPU, whose states are wanted.
SequenceSegment WholeBatch(const std::vector<int64_t>& cu_seqlens) {
  const at::Tensor starts = OnGpu(at::tensor(cu_seqlens, at::kLong).to(at::kInt));
  SequenceSegment segment = CutSegment(cu_seqlens, starts, 0, cu_seqlens.back());
  segment.continued = true;
  return segment;
}

// On the device and in the type of `options`.
Result RunDeltaNet(const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& narrow_weights,
                   const std::vector<int64_t>& cu_seqlens, bool states, uint64_t seed_of_run,
                   const at::TensorOptions& options) {
  const bool gpu = options.device().is_cuda();
  const auto documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  const int64_t tokens = cu_seqlens.back();
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  const at::TensorOptions wide = options.dtype(type == at::kDouble ? at::kDouble : at::kFloat);
  GatedDeltaNetTensors weights;
  for (const auto& [name, field] : DeltaNetFields()) {
    weights.*field = (narrow_weights.*field).to(options);
  }
  GatedDeltaNetState state, dstate;
  if (states) {
    state = RandomDeltaNetState(shape, documents, kTaps, seed_of_run + 30);
    state.convolution_DPC = state.convolution_DPC.to(at::kBFloat16).to(options);
    state.rule_DNKV = state.rule_DNKV.to(at::kFloat).to(wide);
    dstate = RandomDeltaNetState(shape, documents, kTaps, seed_of_run + 40);
    dstate.convolution_DPC = dstate.convolution_DPC.to(at::kFloat).to(wide);
    dstate.rule_DNKV = dstate.rule_DNKV.to(at::kFloat).to(wide);
  }
  const auto random = [&](uint64_t seed) {
    return Random({tokens, kHidden}, seed_of_run + seed, at::kBFloat16).to(options);
  };
  const auto batch = [&] { return DeltaNetBatch(WholeBatch(cu_seqlens)); };
  GatedDeltaNetSaved saved;
  const at::Tensor x = random(50);
  const GatedDeltaNetOutput output =
      gpu ? CudaGatedDeltaNetForward(shape, weights, x, state, batch(), &saved)
          : GatedDeltaNetForward(shape, weights, x, state, cu_seqlens, &saved);
  Result result;
  result.Add("y", output.y_TH);
  result.Add("context", output.state.convolution_DPC);
  result.Add("state", output.state.rule_DNKV);
  EXPECT_EQ(output.y_TH.scalar_type(), type);
  GatedDeltaNetTensors gradients;
  for (const auto& [name, field] : DeltaNetFields()) {
    gradients.*field = at::zeros((weights.*field).sizes(), wide);
  }
  for (const uint64_t seed : {51, 52}) {
    const GatedDeltaNetGradients backward =
        gpu ? CudaGatedDeltaNetBackward(shape, weights, random(seed), dstate, saved, batch(),
                                        &gradients)
            : GatedDeltaNetBackward(shape, weights, random(seed), dstate, saved, cu_seqlens,
                                    &gradients);
    result.Add("dx", backward.x_TH);
    if (states) {
      result.Add("dcontext", backward.state.convolution_DPC);
      result.Add("dstate", backward.state.rule_DNKV);
    }
    EXPECT_EQ(backward.state.rule_DNKV.defined(), states);
  }
  for (const auto& [name, field] : DeltaNetFields()) result.Add("d" + name, gradients.*field);
  return result;
}

// Relative errors, squared, of results by name.
struct Errors {
  double of_gpu = 0.0;
  double of_composite = 0.0;
};

GatedDeltaNetTensors NarrowWeights(const GatedDeltaNetShape& shape, uint64_t seed) {
  GatedDeltaNetTensors narrow = RandomDeltaNet(shape, kHidden, kTaps, seed);
  for (const auto& [name, field] : DeltaNetFields()) {
    narrow.*field = (narrow.*field).to(at::kBFloat16);
  }
  return narrow;
}

// Adds the errors of one run to `by_name`, and sees to it that the next run has the same bits.
void AddErrors(const GatedDeltaNetShape& shape, const std::vector<int64_t>& cu_seqlens, bool states,
               uint64_t seed, std::map<std::string, Errors>* by_name) {
  const GatedDeltaNetTensors weights = NarrowWeights(shape, seed + 10);
  const auto run = [&](const at::TensorOptions& options) {
    return RunDeltaNet(shape, weights, cu_seqlens, states, seed, options);
  };
  const Result gpu = run(at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
  const Result composite = run(at::TensorOptions(at::kBFloat16));
  const Result exact = run(at::TensorOptions(at::kDouble));
  for (size_t i = 0; i < exact.names.size(); ++i) {
    ASSERT_EQ(gpu.tensors[i].sizes(), exact.tensors[i].sizes()) << exact.names[i];
    const auto square = [&](const Result& result) {
      return std::pow(RelativeError(ToTruth(result.tensors[i]), exact.tensors[i]), 2);
    };
    Errors& errors = (*by_name)[exact.names[i]];
    errors.of_gpu += square(gpu);
    errors.of_composite += square(composite);
  }
  const Result again = run(at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
  ExpectBitEqual(gpu.tensors, again.tensors, "the mixer");
}

TEST(GatedDeltaNetCudaTest, IsAsNearToTheTruthAsTheComposite) {
  // The gradients of A_log and dt_bias have an element a head: one run's errors of them say little.
  constexpr uint64_t kSeeds = 6;
  const std::vector<GatedDeltaNetShape> shapes = {
      {.key_heads = 2, .value_heads = 4, .key_size = 128, .value_size = 128},
      {.key_heads = 1, .value_heads = 4, .key_size = 128, .value_size = 128}};
  for (const GatedDeltaNetShape& shape : shapes) {
    for (const std::vector<int64_t>& cu_seqlens :
         {std::vector<int64_t>{0, 320}, std::vector<int64_t>{0, 1, 30, 158, 159, 300}}) {
      for (const bool states : {false, true}) {
        std::printf("%d value heads, %d documents, states %d\n",
                    static_cast<int>(shape.value_heads), static_cast<int>(cu_seqlens.size()) - 1,
                    states);
        std::map<std::string, Errors> by_name;
        for (uint64_t seed = 0; seed < kSeeds; ++seed) {
          AddErrors(shape, cu_seqlens, states, 1000 * seed, &by_name);
        }
        Errors all;
        for (const auto& [name, errors] : by_name) {
          const double ratio = std::sqrt(errors.of_gpu / errors.of_composite);
          std::printf("  %-24s error %.2f times the composite's\n", name.c_str(), ratio);
          // Written so that NaN fails. A single result may be unlucky; all of them together may not.
          EXPECT_TRUE(ratio <= 1.5 || errors.of_gpu == 0.0) << name;
          all.of_gpu += errors.of_gpu;
          all.of_composite += errors.of_composite;
        }
        EXPECT_TRUE(all.of_gpu <= 1.05 * 1.05 * all.of_composite);
        std::printf("errors %.2f times the composite's\n",
                    std::sqrt(all.of_gpu / all.of_composite));
      }
    }
  }
}

TEST(GatedDeltaNetCudaDeathTest, HeadsThatAreNotOf128AreRefused) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const GatedDeltaNetShape shape{
      .key_heads = 1, .value_heads = 2, .key_size = 64, .value_size = 64};
  GatedDeltaNetTensors weights = RandomDeltaNet(shape, kHidden, kTaps, 10, at::kBFloat16);
  for (const auto& [name, field] : DeltaNetFields()) weights.*field = OnGpu(weights.*field);
  const at::Tensor x = OnGpu(Random({8, kHidden}, 1, at::kBFloat16));
  EXPECT_DEATH(
      CudaGatedDeltaNetForward(shape, weights, x, {}, DeltaNetBatch(WholeBatch({0, 8})), nullptr),
      "heads of 128");
}

}  // namespace
}  // namespace oom::testing
