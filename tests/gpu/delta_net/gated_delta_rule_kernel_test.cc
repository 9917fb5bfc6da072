// Goal: the gated delta rule's kernels are runtime/ops/gated_delta_rule, for every way that
// documents fall into chunks, with and without states, and repeat bit for bit. Method: the
// composite on the CPU, in FP64 as the truth and with a BF16 v. The composite's gradients are FP32,
// which factors of 16 bits cannot reach: rounded to the activations' type they set the bar.

#include <gtest/gtest.h>

#include "runtime/kernels/gated_delta_rule.h"
#include "runtime/ops/gated_delta_rule.h"
#include "runtime/ops/l2_norm.h"
#include "tests/gpu/delta_net/delta_chunks_reference.h"
#include "tests/gpu/delta_net/delta_net_testing.h"

namespace oom::testing {
namespace {

struct Case {
  std::string name;
  std::vector<int64_t> cu_seqlens;
  int key_heads;
  int value_heads;
  bool states;
  double gradient_size = 1.0;
};

std::vector<int64_t> OddDocuments(int64_t count) {
  std::vector<int64_t> cu_seqlens = {0};
  for (int64_t i = 0; i < count; ++i) cu_seqlens.push_back(cu_seqlens.back() + 1 + 7 * i % 53);
  return cu_seqlens;
}

const std::vector<Case> kCases = {
    {"one chunk", {0, 64}, 1, 2, false},
    {"one token", {0, 1}, 1, 2, true},
    {"one document", {0, 512}, 2, 4, false},
    {"length no multiple of 64", {0, 450}, 2, 8, true},
    {"documents, one empty, one of a token", {0, 1, 20, 20, 149, 192, 211}, 2, 4, true},
    {"many documents", OddDocuments(70), 1, 2, true},
    {"many documents without states", OddDocuments(40), 1, 4, false},
    {"as many value heads as key heads", {0, 130, 200}, 3, 3, true},
    {"gradients of 1e-9", {0, 200}, 1, 2, true, 1e-9},
    {"gradients of 1e6", {0, 200}, 1, 2, true, 1e6},
};

struct Inputs {
  GatedDeltaRuleInput rule;  // q and k FP32 of FP16 values, v BF16, the rest FP32.
  at::Tensor doutput;
  at::Tensor dstate;
};

Inputs RandomInputs(const Case& c, uint64_t seed) {
  const int64_t tokens = c.cu_seqlens.back();
  const auto documents = static_cast<int64_t>(c.cu_seqlens.size()) - 1;
  const auto random = [&](at::IntArrayRef shape) { return Random(shape, ++seed).to(at::kFloat); };
  Inputs inputs;
  GatedDeltaRuleInput& rule = inputs.rule;
  // Keys with something in common, as trained ones have.
  rule.query_TGK =
      L2NormForward(random({tokens, c.key_heads, 128}), 1e-6).to(at::kHalf).to(at::kFloat);
  rule.key_TGK =
      L2NormForward(
          random({tokens, c.key_heads, 128}).add_(random({1, c.key_heads, 128}).mul_(0.5)), 1e-6)
          .to(at::kHalf)
          .to(at::kFloat);
  rule.value_TNV = random({tokens, c.value_heads, 128}).to(at::kBFloat16);
  // From heads that keep almost everything to heads that forget within a token.
  rule.log_decay_TN = random({tokens, c.value_heads})
                          .mul_(2)
                          .sub_(at::arange(c.value_heads, at::kFloat).mul_(2))
                          .exp_()
                          .clamp_max_(40)
                          .neg_();
  rule.beta_TN = random({tokens, c.value_heads}).mul_(2).sigmoid_();
  inputs.doutput = random({tokens, c.value_heads, 128}).mul_(c.gradient_size);
  if (c.states) {
    rule.state_DNKV = random({documents, c.value_heads, 128, 128});
    inputs.dstate = random({documents, c.value_heads, 128, 128}).mul_(c.gradient_size);
  }
  return inputs;
}

// The kernels' input, kept alive.
struct OnDevice {
  OnDevice(const Inputs& inputs, const std::vector<int64_t>& cu_seqlens)
      : query(OnGpu(inputs.rule.query_TGK.to(at::kHalf))),
        key(OnGpu(inputs.rule.key_TGK.to(at::kHalf))),
        value(OnGpu(inputs.rule.value_TNV)),
        log_decay(OnGpu(inputs.rule.log_decay_TN)),
        beta(OnGpu(inputs.rule.beta_TN)),
        state(OnGpu(inputs.rule.state_DNKV)) {
    DeltaChunks lists(cu_seqlens);
    chunks = OnGpu(at::from_blob(lists.chunks.data(),
                                 {static_cast<int64_t>(lists.chunks.size()), 2}, at::kLong));
    document_chunks =
        OnGpu(at::from_blob(lists.document_chunks.data(),
                            {static_cast<int64_t>(lists.document_chunks.size())}, at::kInt));
    shape = {.tokens = value.size(0),
             .documents = static_cast<int64_t>(cu_seqlens.size()) - 1,
             .chunks = chunks.size(0),
             .key_heads = static_cast<int>(query.size(1)),
             .value_heads = static_cast<int>(value.size(1))};
  }

  GatedDeltaRuleKernelInput Input() const {
    return {.chunks = static_cast<const DeltaChunk*>(chunks.data_ptr()),
            .document_chunks = document_chunks.data_ptr<int32_t>(),
            .query_TGK = static_cast<const __half*>(query.data_ptr()),
            .key_TGK = static_cast<const __half*>(key.data_ptr()),
            .value_TNV = static_cast<const __nv_bfloat16*>(value.data_ptr()),
            .log_decay_TN = log_decay.data_ptr<float>(),
            .beta_TN = beta.data_ptr<float>(),
            .state_DNKV = state.defined() ? state.data_ptr<float>() : nullptr};
  }

  at::Tensor query, key, value, log_decay, beta, state, chunks, document_chunks;
  GatedDeltaRuleShape shape;
};

// o and the states after each document.
std::vector<at::Tensor> RunForward(const OnDevice& on) {
  const at::Tensor output = Unwritten(on.value.sizes(), at::kBFloat16);
  const at::Tensor state =
      Unwritten({on.shape.documents, on.shape.value_heads, 128, 128}, at::kFloat);
  const at::Tensor scratch = UnwrittenBytes(GatedDeltaRuleForwardScratchBytes(on.shape));
  GatedDeltaRuleForward(on.shape, on.Input(),
                        {.output_TNV = static_cast<__nv_bfloat16*>(output.data_ptr()),
                         .state_DNKV = state.data_ptr<float>()},
                        scratch.data_ptr(), nullptr);
  return {output, state};
}

// dq, dk, dv, dg, dbeta and, if there are states, theirs.
std::vector<at::Tensor> RunBackward(const OnDevice& on, const Inputs& inputs) {
  const at::Tensor doutput = OnGpu(inputs.doutput), dstate = OnGpu(inputs.dstate);
  std::vector<at::Tensor> results;
  for (const at::Tensor& like : {on.query, on.key, on.value, on.log_decay, on.beta, on.state}) {
    results.push_back(like.defined() ? Unwritten(like.sizes(), at::kFloat) : at::Tensor());
  }
  const auto pointer = [&](size_t i) {
    return results[i].defined() ? results[i].data_ptr<float>() : nullptr;
  };
  const at::Tensor scratch = UnwrittenBytes(GatedDeltaRuleBackwardScratchBytes(on.shape));
  GatedDeltaRuleBackward(on.shape, on.Input(),
                         {.output_TNV = doutput.data_ptr<float>(),
                          .state_DNKV = dstate.defined() ? dstate.data_ptr<float>() : nullptr},
                         {.query_TGK = pointer(0),
                          .key_TGK = pointer(1),
                          .value_TNV = pointer(2),
                          .log_decay_TN = pointer(3),
                          .beta_TN = pointer(4),
                          .state_DNKV = pointer(5)},
                         scratch.data_ptr(), nullptr);
  return results;
}

GatedDeltaRuleInput Truth(const GatedDeltaRuleInput& input) {
  return {.query_TGK = ToTruth(input.query_TGK),
          .key_TGK = ToTruth(input.key_TGK),
          .value_TNV = ToTruth(input.value_TNV),
          .log_decay_TN = ToTruth(input.log_decay_TN),
          .beta_TN = ToTruth(input.beta_TN),
          .state_DNKV = ToTruth(input.state_DNKV)};
}

std::vector<at::Tensor> Listed(const GatedDeltaRuleGradients& gradients) {
  return {gradients.query_TGK,    gradients.key_TGK, gradients.value_TNV,
          gradients.log_decay_TN, gradients.beta_TN, gradients.state_DNKV};
}

TEST(GatedDeltaRuleKernelTest, ForwardIsAsNearToTheTruthAsTheComposite) {
  for (const Case& c : kCases) {
    std::printf("%s\n", c.name.c_str());
    const Inputs inputs = RandomInputs(c, 100);
    const OnDevice on(inputs, c.cu_seqlens);
    const std::vector<at::Tensor> actual = RunForward(on);
    const GatedDeltaRuleOutput composite = GatedDeltaRuleForward(inputs.rule, c.cu_seqlens);
    const GatedDeltaRuleOutput exact = GatedDeltaRuleForward(Truth(inputs.rule), c.cu_seqlens);
    // Beside the rounding of o there are those of the factors, an eighth of it each.
    ExpectNoWorse("o", actual[0], composite.output_TNV, exact.output_TNV, 1.1,
                  1.1 * kBfloat16Error);
    ExpectNoWorse("state", actual[1], composite.state_DNKV.to(at::kBFloat16), exact.state_DNKV, 0.5,
                  0.5 * kBfloat16Error);
    ExpectBitEqual(actual, RunForward(on), c.name);
  }
}

TEST(GatedDeltaRuleKernelTest, GradientsAreNearerToTheTruthThanTheCompositesInBfloat16) {
  const std::vector<std::string> names = {"dq", "dk", "dv", "dg", "dbeta", "dstate"};
  for (const Case& c : kCases) {
    std::printf("%s\n", c.name.c_str());
    const Inputs inputs = RandomInputs(c, 200);
    const OnDevice on(inputs, c.cu_seqlens);
    const std::vector<at::Tensor> actual = RunBackward(on, inputs);
    const std::vector<at::Tensor> composite =
        Listed(GatedDeltaRuleBackward(inputs.doutput, inputs.dstate, inputs.rule, c.cu_seqlens));
    const std::vector<at::Tensor> exact = Listed(GatedDeltaRuleBackward(
        ToTruth(inputs.doutput), ToTruth(inputs.dstate), Truth(inputs.rule), c.cu_seqlens));
    for (size_t i = 0; i < names.size(); ++i) {
      if (!exact[i].defined()) continue;
      ExpectNoWorse(names[i], actual[i], composite[i].to(at::kBFloat16), exact[i], 0.6,
                    0.6 * kBfloat16Error);
    }
    ExpectBitEqual(actual, RunBackward(on, inputs), c.name);
  }
}

// A sequence cut at a multiple of 64 has the chunks of the uncut one, hence its bits.
TEST(GatedDeltaRuleKernelTest, SegmentsGiveTheBitsOfTheWholeSequence) {
  constexpr int64_t kLength = 320, kCut = 192;
  const Case whole_case{"whole", {0, kLength}, 2, 4, true};
  const Inputs whole = RandomInputs(whole_case, 300);
  const auto part = [&](int64_t first, int64_t end, const at::Tensor& state,
                        const at::Tensor& dstate) {
    const auto rows = [&](const at::Tensor& x) { return x.narrow(0, first, end - first); };
    Inputs inputs;
    inputs.rule = {.query_TGK = rows(whole.rule.query_TGK),
                   .key_TGK = rows(whole.rule.key_TGK),
                   .value_TNV = rows(whole.rule.value_TNV),
                   .log_decay_TN = rows(whole.rule.log_decay_TN),
                   .beta_TN = rows(whole.rule.beta_TN),
                   .state_DNKV = state};
    inputs.doutput = rows(whole.doutput);
    inputs.dstate = dstate;
    return inputs;
  };
  const OnDevice on(whole, {0, kLength});
  const std::vector<at::Tensor> uncut = RunForward(on);
  const OnDevice on_first(part(0, kCut, whole.rule.state_DNKV, {}), {0, kCut});
  const std::vector<at::Tensor> first = RunForward(on_first);
  const Inputs late = part(kCut, kLength, first[1], whole.dstate);
  const OnDevice on_late(late, {0, kLength - kCut});
  const std::vector<at::Tensor> second = RunForward(on_late);
  ExpectBitEqual({at::cat({first[0], second[0]}), second[1]}, uncut, "forward");

  // Each segment's gradients have their own power of two, so that only rounding below FP16's normal
  // numbers may differ.
  const std::vector<at::Tensor> gradients = RunBackward(on, whole);
  const std::vector<at::Tensor> of_late = RunBackward(on_late, late);
  const std::vector<at::Tensor> of_first =
      RunBackward(on_first, part(0, kCut, whole.rule.state_DNKV, of_late[5]));
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_LT(RelativeError(ToTruth(at::cat({of_first[i], of_late[i]})), ToTruth(gradients[i])),
              1e-3)
        << i;
  }
  EXPECT_LT(RelativeError(ToTruth(of_first[5]), ToTruth(gradients[5])), 1e-3);
}

// e^(G_i - G_j) above the diagonal would be infinite here.
TEST(GatedDeltaRuleKernelTest, AHeadThatForgetsEverythingStaysFinite) {
  const Case c{"forgets", {0, 150}, 1, 2, true};
  Inputs inputs = RandomInputs(c, 400);
  inputs.rule.log_decay_TN.fill_(-60);
  const OnDevice on(inputs, c.cu_seqlens);
  for (const at::Tensor& result : RunForward(on)) {
    EXPECT_TRUE(result.isfinite().all().item<bool>());
  }
  for (const at::Tensor& result : RunBackward(on, inputs)) {
    EXPECT_TRUE(result.isfinite().all().item<bool>());
  }
}

TEST(GatedDeltaRuleKernelTest, ZeroGradientsGiveZeros) {
  const Case c{"zeros", {0, 100}, 1, 2, true, 0.0};
  const Inputs inputs = RandomInputs(c, 500);
  for (const at::Tensor& result : RunBackward(OnDevice(inputs, c.cu_seqlens), inputs)) {
    EXPECT_EQ(result.abs().max().item<float>(), 0.0f);
  }
}

// Goal: offsets beyond 2^31 elements are right.
// Method: a document that begins at a multiple of 64 has the bits of the document alone.
TEST(GatedDeltaRuleKernelTest, ADocumentBehindTwoToThe31ElementsIsRight) {
  constexpr int64_t kTokens = (int64_t{1} << 31) / (32 * 128) + 640, kTail = 320;
  const Case c{"tail", {0, kTail}, 16, 32, false};
  const Inputs tail = RandomInputs(c, 600);
  const auto repeated = [&](const at::Tensor& x) {
    std::vector<int64_t> times(static_cast<size_t>(x.dim()), 1);
    times[0] = kTokens / kTail + 1;
    return OnGpu(x).repeat(times).narrow(0, 0, kTokens - kTail);
  };
  Inputs many;
  const auto grown = [&](const at::Tensor& x) { return at::cat({repeated(x), OnGpu(x)}); };
  many.rule = {.query_TGK = grown(tail.rule.query_TGK.to(at::kHalf)),
               .key_TGK = grown(tail.rule.key_TGK.to(at::kHalf)),
               .value_TNV = grown(tail.rule.value_TNV),
               .log_decay_TN = grown(tail.rule.log_decay_TN),
               .beta_TN = grown(tail.rule.beta_TN)};
  static_assert((kTokens - kTail) % 64 == 0);
  const std::vector<at::Tensor> whole = RunForward(OnDevice(many, {0, kTokens - kTail, kTokens}));
  const std::vector<at::Tensor> alone = RunForward(OnDevice(tail, {0, kTail}));
  ExpectBitEqual({whole[0].narrow(0, kTokens - kTail, kTail), whole[1].narrow(0, 1, 1)}, alone,
                 "the last document");
}

}  // namespace
}  // namespace oom::testing
