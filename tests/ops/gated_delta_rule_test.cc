// Goal: the chunked delta rule is the token recurrence, forward and backward, with states in and
// out and documents that do not mix.
// Method: token by token in FP64 under LibTorch's autograd, at random points (seeds below).

#include <gtest/gtest.h>

#include "runtime/ops/l2_norm.h"
#include "tests/ops/delta_net_reference.h"

namespace oom::testing {
namespace {

constexpr double kExact = 1e-11;

// One token, a document that ends within its chunk, one that crosses two, one without tokens.
const std::vector<int64_t> kDocuments = {0, 1, 20, 20, 149, 192, 211};

int64_t DocumentCount(const std::vector<int64_t>& cu_seqlens) {
  return static_cast<int64_t>(cu_seqlens.size()) - 1;
}

struct RuleSizes {
  int64_t key_heads = 2;
  int64_t value_heads = 4;
  int64_t key_size = 6;
  int64_t value_size = 5;
};

GatedDeltaRuleInput RandomInput(const std::vector<int64_t>& cu_seqlens, uint64_t seed,
                                at::ScalarType type = at::kDouble, const RuleSizes& sizes = {}) {
  const int64_t tokens = cu_seqlens.back();
  const auto random = [&](at::IntArrayRef shape) { return Random(shape, ++seed); };
  GatedDeltaRuleInput input;
  input.query_TGK = L2NormForward(random({tokens, sizes.key_heads, sizes.key_size}), 1e-6).to(type);
  input.key_TGK = L2NormForward(random({tokens, sizes.key_heads, sizes.key_size}), 1e-6).to(type);
  input.value_TNV = random({tokens, sizes.value_heads, sizes.value_size}).to(type);
  // From heads that keep almost everything to heads that forget within a token.
  input.log_decay_TN = random({tokens, sizes.value_heads})
                           .mul_(2)
                           .sub_(at::arange(sizes.value_heads, at::kDouble).mul_(2))
                           .exp_()
                           .clamp_max_(40)
                           .neg_()
                           .to(type);
  input.beta_TN = random({tokens, sizes.value_heads}).mul_(2).sigmoid_().to(type);
  input.state_DNKV =
      random({DocumentCount(cu_seqlens), sizes.value_heads, sizes.key_size, sizes.value_size})
          .to(type);
  return input;
}

const std::vector<std::pair<std::string, at::Tensor GatedDeltaRuleInput::*>> kInputs = {
    {"query", &GatedDeltaRuleInput::query_TGK}, {"key", &GatedDeltaRuleInput::key_TGK},
    {"value", &GatedDeltaRuleInput::value_TNV}, {"log_decay", &GatedDeltaRuleInput::log_decay_TN},
    {"beta", &GatedDeltaRuleInput::beta_TN},    {"state", &GatedDeltaRuleInput::state_DNKV}};

std::vector<at::Tensor> Listed(const GatedDeltaRuleGradients& gradients) {
  return {gradients.query_TGK,    gradients.key_TGK, gradients.value_TNV,
          gradients.log_decay_TN, gradients.beta_TN, gradients.state_DNKV};
}

TEST(GatedDeltaRuleTest, ForwardAndBackwardAreThoseOfTheTokenRecurrence) {
  const std::vector<std::vector<int64_t>> layouts = {kDocuments, {0, 1},  {0, 63},
                                                     {0, 64},    {0, 65}, {0, 130}};
  for (const std::vector<int64_t>& documents : layouts) {
    SCOPED_TRACE(documents.back());
    const GatedDeltaRuleInput input = RandomInput(documents, 10);
    GatedDeltaRuleInput leaves = input;
    std::vector<at::Tensor> listed;
    for (const auto& [name, field] : kInputs) {
      leaves.*field = (input.*field).clone().requires_grad_();
      listed.push_back(leaves.*field);
    }
    const GatedDeltaRuleOutput expected = ReferenceDeltaRule(leaves, documents);
    const at::Tensor doutput = Random(input.value_TNV.sizes(), 30);
    const at::Tensor dstate = Random(input.state_DNKV.sizes(), 31);
    const at::Tensor sum =
        (expected.output_TNV * doutput).sum() + (expected.state_DNKV * dstate).sum();
    const std::vector<at::Tensor> derivatives = Autograd(sum, at::ones_like(sum), listed);

    const GatedDeltaRuleOutput actual = GatedDeltaRuleForward(input, documents);
    ExpectNear(actual.output_TNV, expected.output_TNV, kExact, "output");
    ExpectNear(actual.state_DNKV, expected.state_DNKV, kExact, "final state");
    const std::vector<at::Tensor> gradients =
        Listed(GatedDeltaRuleBackward(doutput, dstate, input, documents));
    for (size_t i = 0; i < kInputs.size(); ++i) {
      ExpectNear(gradients[i], derivatives[i], kExact, kInputs[i].first);
    }
  }
}

TEST(GatedDeltaRuleTest, UndefinedStatesAreZeros) {
  GatedDeltaRuleInput input = RandomInput(kDocuments, 50);
  const at::Tensor doutput = Random(input.value_TNV.sizes(), 51);
  input.state_DNKV.zero_();
  const at::Tensor no_gradient = at::zeros_like(input.state_DNKV);
  const GatedDeltaRuleOutput expected = GatedDeltaRuleForward(input, kDocuments);
  const std::vector<at::Tensor> gradients =
      Listed(GatedDeltaRuleBackward(doutput, no_gradient, input, kDocuments));
  input.state_DNKV.reset();
  const GatedDeltaRuleOutput actual = GatedDeltaRuleForward(input, kDocuments);
  EXPECT_TRUE(BitEqual(actual.output_TNV, expected.output_TNV));
  EXPECT_TRUE(BitEqual(actual.state_DNKV, expected.state_DNKV));
  const std::vector<at::Tensor> without =
      Listed(GatedDeltaRuleBackward(doutput, at::Tensor(), input, kDocuments));
  EXPECT_FALSE(without.back().defined());
  for (size_t i = 0; i + 1 < without.size(); ++i) {
    EXPECT_TRUE(BitEqual(without[i], gradients[i])) << kInputs[i].first;
  }
}

TEST(GatedDeltaRuleTest, Fp32AtPublishedHeadSizesHoldsTheParityBars) {
  const std::vector<int64_t> documents = {0, 150, 213};
  const GatedDeltaRuleInput narrow =
      RandomInput(documents, 70, at::kFloat,
                  {.key_heads = 1, .value_heads = 2, .key_size = 128, .value_size = 128});
  GatedDeltaRuleInput exact;
  for (const auto& [name, field] : kInputs) exact.*field = (narrow.*field).to(at::kDouble);
  const GatedDeltaRuleOutput actual = GatedDeltaRuleForward(narrow, documents);
  const GatedDeltaRuleOutput expected = ReferenceDeltaRule(exact, documents);
  ExpectNear(actual.output_TNV, expected.output_TNV, 1e-5, "output");
  ExpectNear(actual.state_DNKV, expected.state_DNKV, 1e-5, "final state");

  const at::Tensor doutput = Random(narrow.value_TNV.sizes(), 80);
  const at::Tensor dstate = Random(narrow.state_DNKV.sizes(), 81);
  const std::vector<at::Tensor> gradients = Listed(
      GatedDeltaRuleBackward(doutput.to(at::kFloat), dstate.to(at::kFloat), narrow, documents));
  const std::vector<at::Tensor> derivatives =
      Listed(GatedDeltaRuleBackward(doutput, dstate, exact, documents));
  for (size_t i = 0; i < kInputs.size(); ++i) {
    ExpectNear(gradients[i], derivatives[i], 1e-4, kInputs[i].first);
  }
}

// A narrow input is widened first, and only the output is rounded.
TEST(GatedDeltaRuleTest, Bf16IsFp32WithARoundedOutput) {
  const GatedDeltaRuleInput narrow = RandomInput(kDocuments, 90, at::kBFloat16);
  GatedDeltaRuleInput wide;
  for (const auto& [name, field] : kInputs) wide.*field = (narrow.*field).to(at::kFloat);
  const GatedDeltaRuleOutput actual = GatedDeltaRuleForward(narrow, kDocuments);
  const GatedDeltaRuleOutput expected = GatedDeltaRuleForward(wide, kDocuments);
  EXPECT_TRUE(BitEqual(actual.output_TNV, expected.output_TNV.to(at::kBFloat16)));
  EXPECT_TRUE(BitEqual(actual.state_DNKV, expected.state_DNKV));
  const at::Tensor doutput = Random(narrow.value_TNV.sizes(), 91, at::kBFloat16);
  const std::vector<at::Tensor> gradients =
      Listed(GatedDeltaRuleBackward(doutput, at::Tensor(), narrow, kDocuments));
  const std::vector<at::Tensor> derivatives =
      Listed(GatedDeltaRuleBackward(doutput.to(at::kFloat), at::Tensor(), wide, kDocuments));
  for (size_t i = 0; i < kInputs.size(); ++i) {
    EXPECT_TRUE(BitEqual(gradients[i], derivatives[i])) << kInputs[i].first;
  }
}

// e^(G_i - G_j) above the diagonal would be infinite here.
TEST(GatedDeltaRuleTest, AHeadThatForgetsEverythingStaysFinite) {
  GatedDeltaRuleInput input = RandomInput({0, 100}, 95, at::kFloat);
  input.log_decay_TN.fill_(-60);
  const GatedDeltaRuleOutput actual = GatedDeltaRuleForward(input, {0, 100});
  EXPECT_TRUE(actual.output_TNV.isfinite().all().item<bool>());
  for (const at::Tensor& gradient : Listed(
           GatedDeltaRuleBackward(at::ones_like(input.value_TNV), at::Tensor(), input, {0, 100}))) {
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
  }
}

TEST(GatedDeltaRuleDeathTest, ASegmentWithoutTokensIsRefused) {
  const GatedDeltaRuleInput input = RandomInput({0, 0}, 99);
  EXPECT_DEATH(GatedDeltaRuleForward(input, {0, 0}), "at least one token");
}

}  // namespace
}  // namespace oom::testing
