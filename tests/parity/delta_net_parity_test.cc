// Goal: the Gated DeltaNet mixer computes what transformers' Qwen3.5 mixer computes, forward and
// backward, in FP32. Method: golden files of delta_net_fixture.py; the documents are packed here
// and ran one by one there.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "runtime/ops/gated_delta_net.h"
#include "tests/parity/comparison.h"

namespace oom::testing {
namespace {

constexpr double kForwardBar = 1e-5;
constexpr double kGradientBar = 1e-4;

const std::vector<std::pair<std::string, at::Tensor GatedDeltaNetTensors::*>> kPublishedNames = {
    {"in_proj_qkv.weight", &GatedDeltaNetTensors::query_key_value},
    {"in_proj_z.weight", &GatedDeltaNetTensors::gate},
    {"in_proj_b.weight", &GatedDeltaNetTensors::beta},
    {"in_proj_a.weight", &GatedDeltaNetTensors::decay},
    {"conv1d.weight", &GatedDeltaNetTensors::convolution},
    {"A_log", &GatedDeltaNetTensors::a_log},
    {"dt_bias", &GatedDeltaNetTensors::dt_bias},
    {"norm.weight", &GatedDeltaNetTensors::norm},
    {"out_proj.weight", &GatedDeltaNetTensors::output}};

struct Case {
  std::string name;
  GatedDeltaNetShape shape;
};

TEST(DeltaNetParityTest, OutputAndGradientsEqualTransformers) {
  const std::vector<Case> cases = {
      {"groups-of-2", {.key_heads = 2, .value_heads = 4, .key_size = 16, .value_size = 24}},
      {"groups-of-4", {.key_heads = 2, .value_heads = 8, .key_size = 32, .value_size = 16}}};
  for (const auto& [name, shape] : cases) {
    SCOPED_TRACE(name);
    const std::filesystem::path folder = OOM_DELTA_NET_FIXTURE;
    const TensorsByName golden = ReadTensors((folder / name).string() + ".safetensors");
    GatedDeltaNetTensors weights, gradients;
    for (const auto& [published, field] : kPublishedNames) {
      weights.*field = golden.at("weight." + published);
      gradients.*field = at::zeros_like(weights.*field);
    }
    std::vector<int64_t> documents;
    const at::Tensor starts = golden.at("documents");
    for (int64_t i = 0; i < starts.size(0); ++i) {
      documents.push_back(static_cast<int64_t>(starts[i].item<float>()));
    }

    GatedDeltaNetSaved saved;
    const GatedDeltaNetOutput output =
        GatedDeltaNetForward(shape, weights, golden.at("x"), {}, documents, &saved);
    EXPECT_LE(RelativeError(output.y_TH, golden.at("y")), kForwardBar);
    const at::Tensor dx =
        GatedDeltaNetBackward(shape, weights, golden.at("dy"), {}, saved, documents, &gradients)
            .x_TH;
    EXPECT_LE(RelativeError(dx, golden.at("gradient.x")), kGradientBar);
    for (const auto& [published, field] : kPublishedNames) {
      EXPECT_LE(RelativeError(gradients.*field, golden.at("gradient." + published)), kGradientBar)
          << published;
    }
  }
}

}  // namespace
}  // namespace oom::testing
