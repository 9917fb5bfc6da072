// Goal: the engine's operators, put together, compute what transformers computes: logits, losses,
// chosen experts and every parameter's gradient, in FP32 and (against the error of transformers'
// own BF16) in BF16. Method: golden files of model_fixture.py; the bars are those of the parity
// table. Then the comparison itself is tested: planted faults must be seen, in the tensors that
// they touch.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tests/parity/comparison.h"
#include "tests/parity/whole_model.h"

namespace oom::testing {
namespace {

constexpr double kLogitsBar = 1e-5;
constexpr double kGradientBar = 1e-4;

const std::vector<std::string> kFp32Cases = {"qwen3",
                                             "qwen3-unnormalized",
                                             "qwen3-yarn-2",
                                             "qwen3-yarn-4",
                                             "mixtral",
                                             "mixtral-window",
                                             "qwen3-5",
                                             "qwen3-5-groups-of-4",
                                             "qwen3-5-yarn",
                                             "gemma4",
                                             "gemma4-own-values"};

std::vector<std::string> Bf16Cases() {
  std::vector<std::string> cases;
  for (const char* family : {"qwen3", "mixtral", "qwen3-5", "gemma4"}) {
    for (int seed = 0; seed < 5; ++seed) {
      cases.push_back(std::string("bf16-") + family + "-" + std::to_string(seed));
    }
  }
  return cases;
}

void ExpectSameExperts(const GoldenCase& golden, const RunResult& run) {
  ASSERT_EQ(run.chosen_experts.size(), golden.chosen_experts.size());
  for (size_t i = 0; i < run.chosen_experts.size(); ++i) {
    EXPECT_TRUE(at::equal(run.chosen_experts[i], golden.chosen_experts[i])) << "routed layer " << i;
  }
}

ErrorsByName GradientErrors(const GoldenCase& golden, const RunResult& run) {
  return Compare(Published(golden, run.gradients), golden.ReferenceWithPrefix("gradient."));
}

class Fp32ParityTest : public ::testing::TestWithParam<std::string> {};

TEST_P(Fp32ParityTest, LogitsLossExpertsAndGradientsEqualTransformers) {
  const GoldenCase golden = ReadGoldenCase(GetParam());
  const std::vector<RunOptions> ways = {
      {},
      {.replay = true},
      {.head_groups = 2,
       .sub_batch_tokens = 91,
       .segment_tokens = 64,
       .mixture_chunk_tokens = 50,
       .head_chunk_tokens = 33}};
  for (size_t way = 0; way < ways.size(); ++way) {
    SCOPED_TRACE("way " + std::to_string(way));
    const RunResult run = RunModel(golden, ways[way]);
    ExpectSameExperts(golden, run);
    EXPECT_LE(RelativeError(run.logits_TV, golden.reference.at("logits")), kLogitsBar);
    EXPECT_NEAR(run.loss, golden.reference.at("loss").item<float>(), 1e-5 * run.loss);
    EXPECT_NEAR(run.auxiliary_loss, golden.reference.at("auxiliary_loss").item<float>(),
                1e-5 * run.auxiliary_loss);
    const ErrorsByName errors = GradientErrors(golden, run);
    EXPECT_EQ(Above(errors, kGradientBar), std::vector<std::string>());
    RecordProperty("gradient_rms_" + std::to_string(way), std::to_string(RootMeanSquare(errors)));
  }
}

// Replaying changes no bit of any gradient.
TEST_P(Fp32ParityTest, ReplayGivesTheBitsOfKeeping) {
  const GoldenCase golden = ReadGoldenCase(GetParam());
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const RunResult kept = RunModel(golden, {.type = type});
    const RunResult replayed = RunModel(golden, {.type = type, .replay = true});
    EXPECT_EQ(kept.loss, replayed.loss);
    for (const auto& [name, gradient] : kept.gradients) {
      EXPECT_TRUE(at::equal(gradient, replayed.gradients.at(name))) << name;
    }
  }
}

// Goal: parts by token change no bit of the forward. One LibTorch thread: see the test's environment. (Query-head groups
// and gradients are held operator by operator: mixer_test, mixture_test, gated_delta_net_test.)
TEST_P(Fp32ParityTest, PartsByTokenGiveTheBitsOfTheWhole) {
  const GoldenCase golden = ReadGoldenCase(GetParam());
  const RunResult whole = RunModel(golden, {});
  const RunResult parts =
      RunModel(golden, {.sub_batch_tokens = 91,
                                            .segment_tokens = 64,
                                            .mixture_chunk_tokens = 64,
                                            .head_chunk_tokens = 64});
  EXPECT_TRUE(at::equal(parts.logits_TV, whole.logits_TV));
}

INSTANTIATE_TEST_SUITE_P(Cases, Fp32ParityTest, ::testing::ValuesIn(kFp32Cases),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

class Bf16ParityTest : public ::testing::TestWithParam<std::string> {};

TEST_P(Bf16ParityTest, ErrorIsThatOfTransformersInBf16WholeAndInParts) {
  const GoldenCase golden = ReadGoldenCase(GetParam());
  const double logits_bar =
      RelativeError(golden.reference.at("bf16.logits"), golden.reference.at("logits"));
  const ErrorsByName theirs = Compare(golden.ReferenceWithPrefix("bf16.gradient."),
                                      golden.ReferenceWithPrefix("gradient."));
  const std::vector<RunOptions> ways = {{.type = at::kBFloat16},
                                        {.type = at::kBFloat16,
                                         .head_groups = 2,
                                         .segment_tokens = 64,
                                         .mixture_chunk_tokens = 20,
                                         .head_chunk_tokens = 33}};
  for (size_t way = 0; way < ways.size(); ++way) {
    SCOPED_TRACE("way " + std::to_string(way));
    const RunResult run = RunModel(golden, ways[way]);
    ExpectSameExperts(golden, run);
    EXPECT_LE(RelativeError(run.logits_TV.to(at::kFloat), golden.reference.at("logits")),
              1.5 * logits_bar);
    const ErrorsByName ours = GradientErrors(golden, run);
    ASSERT_EQ(ours.size(), theirs.size());
    EXPECT_LE(RootMeanSquare(ours), 1.5 * RootMeanSquare(theirs));
    for (const auto& [name, error] : ours) EXPECT_LE(error, 4 * theirs.at(name)) << name;
    RecordProperty("rms_ratio_" + std::to_string(way),
                   std::to_string(RootMeanSquare(ours) / RootMeanSquare(theirs)));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Bf16ParityTest, ::testing::ValuesIn(Bf16Cases()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// A fault and the names that it touches, in the gradients of one step.
struct Fault {
  std::string what;
  std::string touched;  // Part of the published names.
  std::function<void(at::Tensor)> plant;
};

TEST(PlantedFaultTest, EachFaultIsSeenInTheTensorsThatItTouchesAndNowhereElse) {
  const std::vector<Fault> faults = {
      {"router not updated", "mlp.gate.weight", [](at::Tensor g) { g.zero_(); }},
      {"k_proj not updated", "k_proj", [](at::Tensor g) { g.zero_(); }},
      {"norms not updated", "norm", [](at::Tensor g) { g.zero_(); }},
      {"one expert's gradient lost", "layers.2.mlp.experts.5.", [](at::Tensor g) { g.zero_(); }},
      {"gradients times 1.1", "", [](at::Tensor g) { g.mul_(1.1); }},
      {"one gradient entry of NaN", "lm_head", [](at::Tensor g) { g.view(-1)[0] = NAN; }},
      {"gradient added twice", "embed_tokens", [](at::Tensor g) { g.mul_(2); }},
  };
  const GoldenCase golden = ReadGoldenCase("qwen3");
  const RunResult run = RunModel(golden, {});
  for (const Fault& fault : faults) {
    TensorsByName faulty;
    std::vector<std::string> touched;
    for (const auto& [name, gradient] : Published(golden, run.gradients)) {
      faulty[name] = gradient.clone();
      if (name.find(fault.touched) == std::string::npos) continue;
      fault.plant(faulty[name]);
      touched.push_back(name);
    }
    ASSERT_FALSE(touched.empty()) << fault.what;
    std::vector<std::string> seen;
    for (const std::string& message :
         Above(Compare(faulty, golden.ReferenceWithPrefix("gradient.")), kGradientBar)) {
      seen.push_back(message.substr(0, message.find(' ')));
    }
    EXPECT_EQ(seen, touched) << fault.what;
  }
}

// Errors within an operator reach the comparison through the whole backward.
TEST(PlantedFaultTest, AWrongModelDescriptionIsSeen) {
  const auto seen = [](const std::string& name,
                       const std::function<void(ModelDescription*)>& change) {
    GoldenCase golden = ReadGoldenCase(name);
    change(&golden.model);
    const RunResult run = RunModel(golden, {});
    return RelativeError(run.logits_TV, golden.reference.at("logits")) > kLogitsBar &&
           !Above(GradientErrors(golden, run), kGradientBar).empty();
  };
  const auto seen_in_attention = [&](const std::string& name,
                                     void (*change)(AttentionDescription*)) {
    return seen(name, [&](ModelDescription* m) {
      for (LayerDescription& layer : m->layers) change(&layer.attention);
    });
  };
  using Attention = AttentionDescription;
  EXPECT_TRUE(seen_in_attention("qwen3", [](Attention* a) { a->rotary.theta *= 2; }));
  EXPECT_TRUE(seen("qwen3", [](ModelDescription* m) { m->norm.epsilon = 1e-5; }));
  EXPECT_TRUE(seen("qwen3", [](ModelDescription* m) { m->renormalize_top_k = false; }));
  EXPECT_TRUE(seen("qwen3-unnormalized", [](ModelDescription* m) { m->renormalize_top_k = true; }));
  EXPECT_TRUE(seen_in_attention("qwen3-yarn-2", [](Attention* a) { a->rotary.yarn.reset(); }));
  EXPECT_TRUE(seen_in_attention("qwen3-yarn-4", [](Attention* a) { a->rotary.yarn->factor = 2; }));
  EXPECT_TRUE(seen_in_attention(
      "qwen3-yarn-4", [](Attention* a) { a->rotary.yarn->attention_factor = 1.0; }));
  EXPECT_TRUE(
      seen_in_attention("qwen3-yarn-4", [](Attention* a) { a->rotary.yarn->truncate = false; }));
  EXPECT_TRUE(seen_in_attention("mixtral-window", [](Attention* a) { a->sliding_window += 1; }));
  EXPECT_TRUE(seen_in_attention("mixtral", [](Attention* a) { a->sliding_window = 16; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) { m->norm.scale = NormScale::kOnePlusWeight; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) { m->norm.epsilon = 1e-5; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) { m->branch_norms = false; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) { m->embedding_scale *= 1.01; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) { m->logit_cap = 0.0; }));
  EXPECT_TRUE(seen("gemma4-own-values", [](ModelDescription* m) { m->logit_cap = 3.0; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) { m->activation = Activation::kSilu; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) { m->renormalize_top_k = false; }));
  EXPECT_TRUE(seen_in_attention("gemma4", [](Attention* a) { a->value_norm = false; }));
  EXPECT_TRUE(seen_in_attention("gemma4", [](Attention* a) { a->query_key_norm = false; }));
  EXPECT_TRUE(seen_in_attention("gemma4", [](Attention* a) { a->score_scale = 0.0; }));
  EXPECT_TRUE(seen_in_attention("gemma4", [](Attention* a) { a->sliding_window += 1; }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) {
    m->layers.back().attention.rotary.pair_count += 1;
  }));
  EXPECT_TRUE(seen("gemma4", [](ModelDescription* m) {
    m->layers.back().attention.rotary.theta = m->layers.front().attention.rotary.theta;
  }));
  EXPECT_TRUE(seen("gemma4-own-values", [](ModelDescription* m) {
    m->layers.back().attention.key_is_value = true;
  }));
}

}  // namespace
}  // namespace oom::testing
