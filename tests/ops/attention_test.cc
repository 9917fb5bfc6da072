// Goal: attention per document equals one dense masked attention, forward and backward; documents
// do not see each other; the same call gives the same bits.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "runtime/ops/blocked_attention.h"
#include "runtime/ops/causal_attention.h"
#include "tests/ops/reference.h"

namespace oom::testing {
namespace {

struct Case {
  std::vector<int64_t> cu_seqlens;
  int64_t window;
};

// One document, equal documents (one batch), odd lengths, lengths of one, an empty document,
// windows.
const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {{0, 33}, 0},   {{0, 11, 22, 33}, 0}, {{0, 1, 8, 15, 32, 33}, 0}, {{0, 5, 5, 33}, 0},
      {{0, 33}, 4},   {{0, 33}, 1},         {{0, 3, 17, 31, 33}, 6},    {{0, 33}, 33},
      {{0, 33}, 1000}};
  return cases;
}

TEST(CausalAttentionTest, BackwardIsTheDerivativeOfForward) {
  for (const auto& [cu_seqlens, window] : Cases()) {
    for (const int64_t kv_heads : {6, 2, 1}) {
      const at::Tensor q = Random({33, 6, 8}, 1).requires_grad_();
      const at::Tensor k = Random({33, kv_heads, 8}, 2).requires_grad_();
      const at::Tensor v = Random({33, kv_heads, 8}, 3).requires_grad_();
      const at::Tensor dy = Random({33, 6, 8}, 4);
      const at::Tensor y = ReferenceAttention(q, k, v, cu_seqlens, window);
      const std::vector<at::Tensor> expected = Autograd(y, dy, {q, k, v});

      const AttentionOutput forward = CausalAttentionForward(q.detach(), k.detach(), v.detach(),
                                                             cu_seqlens, {.window = window});
      const AttentionGradients actual = CausalAttentionBackward(
          dy, q.detach(), k.detach(), v.detach(), forward, cu_seqlens, {.window = window});
      const std::string what = "window " + std::to_string(window) + ", documents " +
                               std::to_string(cu_seqlens.size() - 1) + ", kv heads " +
                               std::to_string(kv_heads);
      ExpectNear(forward.output_TNd, y, 1e-12, what + ": o");
      ExpectNear(actual.query_TNd, expected[0], 1e-12, what + ": dq");
      ExpectNear(actual.key_TGd, expected[1], 1e-12, what + ": dk");
      ExpectNear(actual.value_TGd, expected[2], 1e-12, what + ": dv");
    }
  }
}

TEST(CausalAttentionTest, Fp32IsWithinRoundingOfDouble) {
  const std::vector<int64_t> cu_seqlens = {0, 700, 1037};
  const at::Tensor q = Random({1037, 4, 16}, 1, at::kFloat),
                   k = Random({1037, 2, 16}, 2, at::kFloat);
  const at::Tensor v = Random({1037, 2, 16}, 3, at::kFloat),
                   dy = Random({1037, 4, 16}, 4, at::kFloat);
  const auto run = [&](at::ScalarType type) {
    const AttentionOutput forward =
        CausalAttentionForward(q.to(type), k.to(type), v.to(type), cu_seqlens);
    const AttentionGradients gradients = CausalAttentionBackward(
        dy.to(type), q.to(type), k.to(type), v.to(type), forward, cu_seqlens);
    return std::vector<at::Tensor>{forward.output_TNd, gradients.query_TNd, gradients.key_TGd,
                                   gradients.value_TGd};
  };
  const std::vector<at::Tensor> actual = run(at::kFloat), expected = run(at::kDouble);
  for (size_t i = 0; i < actual.size(); ++i)
    ExpectNear(actual[i], expected[i], 1e-6, std::to_string(i));
}

TEST(CausalAttentionTest, ATokenChangesNothingBeforeItOrInAnotherDocument) {
  const std::vector<int64_t> cu_seqlens = {0, 9, 20, 31};
  const at::Tensor q = Random({31, 4, 8}, 1), k = Random({31, 2, 8}, 2), v = Random({31, 2, 8}, 3);
  const at::Tensor before = CausalAttentionForward(q, k, v, cu_seqlens).output_TNd;
  const int64_t changed = 13;
  at::Tensor other_k = k.clone(), other_v = v.clone();
  other_k.select(0, changed).add_(1.0);
  other_v.select(0, changed).add_(1.0);
  const at::Tensor after = CausalAttentionForward(q, other_k, other_v, cu_seqlens).output_TNd;
  for (int64_t t = 0; t < 31; ++t) {
    const bool may_change = t >= changed && t < 20;
    EXPECT_EQ(!BitEqual(before.select(0, t), after.select(0, t)), may_change) << "token " << t;
  }
}

// Documents of one length; blocks of many and of few rows, and of one.
TEST(CausalAttentionTest, WrittenOutByBlockItIsTheSame) {
  const std::vector<int64_t> cu_seqlens = {0, 33, 66};
  const auto by_document = [](const at::Tensor& x) {
    return x.view({2, 33, x.size(1), 8}).transpose(1, 2);
  };
  const auto by_token = [](const at::Tensor& x) { return x.transpose(1, 2).flatten(0, 1); };
  for (const int64_t window : {0, 2, 4, 33, 1000}) {
    for (const int64_t block_elements : {1 << 20, 2 * 6 * 33 * 7, 1}) {
      for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
        const at::Tensor q = Random({66, 6, 8}, 1, type), k = Random({66, 2, 8}, 2, type);
        const at::Tensor v = Random({66, 2, 8}, 3, type), dy = Random({66, 6, 8}, 4, type);
        const AttentionOutput expected =
            CausalAttentionForward(q, k, v, cu_seqlens, {.window = window});
        const AttentionGradients gradients =
            CausalAttentionBackward(dy, q, k, v, expected, cu_seqlens, {.window = window});
        const BlockedAttentionOptions options = {.rule = {.window = window},
                                                 .block_elements = block_elements};
        const auto [output, logsumexp] =
            BlockedAttentionForward(by_document(q), by_document(k), by_document(v), options);
        const auto [dq, dk, dv] =
            BlockedAttentionBackward(by_document(dy), by_document(q), by_document(k),
                                     by_document(v), output, logsumexp, options);
        const double bar = type == at::kDouble ? 1e-13 : 1e-6;
        const std::string what =
            "window " + std::to_string(window) + ", block " + std::to_string(block_elements);
        ExpectNear(by_token(output), expected.output_TNd, bar, what + ": o");
        ExpectNear(by_token(logsumexp), expected.logsumexp_TN, bar, what + ": log-sum-exp");
        ExpectNear(by_token(dq), gradients.query_TNd, bar, what + ": dq");
        ExpectNear(by_token(dk), gradients.key_TGd, bar, what + ": dk");
        ExpectNear(by_token(dv), gradients.value_TGd, bar, what + ": dv");
      }
    }
  }
}

// Two threads, so that a kernel that lets threads add up in the order of arrival is seen.
TEST(CausalAttentionTest, EveryRunGivesTheSameBits) {
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  const std::vector<int64_t> cu_seqlens = {0, 70, 140, 190};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor q = Random({190, 4, 16}, 1, type), k = Random({190, 1, 16}, 2, type);
    const at::Tensor v = Random({190, 1, 16}, 3, type), dy = Random({190, 4, 16}, 4, type);
    const auto run = [&] {
      const AttentionOutput forward = CausalAttentionForward(q, k, v, cu_seqlens);
      return CausalAttentionBackward(dy, q, k, v, forward, cu_seqlens);
    };
    const AttentionGradients first = run();
    for (int i = 0; i < 4; ++i) {
      const AttentionGradients again = run();
      EXPECT_TRUE(BitEqual(first.query_TNd, again.query_TNd));
      EXPECT_TRUE(BitEqual(first.key_TGd, again.key_TGd));
      EXPECT_TRUE(BitEqual(first.value_TGd, again.value_TGd));
    }
  }
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace oom::testing
