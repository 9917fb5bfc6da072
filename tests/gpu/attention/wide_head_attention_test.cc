// Goal: attention of wide heads is as near to FP64 as the composite in BF16, forward and backward,
// for groups of any size, documents of any lengths and windows, also where keys and queries are
// many blocks, with and without Hopper's instructions; its log-sum-exp is exact; it has the same
// bits in every run.

#include "runtime/ops/cuda/wide_head_attention.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/gpu/ops/cuda_ops_testing.h"

namespace oom::testing {
namespace {

struct Case {
  std::string name;
  int64_t query_heads = 16;
  int64_t kv_heads = 2;
  int64_t head_size = 512;
  std::vector<int64_t> cu_seqlens;
  int64_t window = 0;
  // Of d^(-1/2). A power of two: the composite, which has no scale, takes scaled queries.
  double scale = 1.0;
  // Of the last key's size; they grow linearly from 0. 0: all keys are of size 1.
  double growth = 0.0;
};

// Whether all tokens do.
bool SeeOnlyThemselves(const Case& c) {
  return c.window == 1 || c.cu_seqlens.back() == static_cast<int64_t>(c.cu_seqlens.size()) - 1;
}

struct Inputs {
  Inputs(const Case& c, const Setting& setting) {
    const int64_t tokens = c.cu_seqlens.back();
    const auto values = [&](int64_t heads, uint64_t seed) {
      return setting(Random({tokens, heads, c.head_size}, seed, at::kBFloat16));
    };
    query = values(c.query_heads, 1);
    key = values(c.kv_heads, 2);
    if (c.growth > 0.0) {
      const at::Tensor size = at::linspace(0.0, c.growth, tokens, at::kDouble).view({-1, 1, 1});
      key = setting(key.to(at::kCPU).to(at::kDouble).mul(size).to(at::kBFloat16));
    }
    value = values(c.kv_heads, 3);
    doutput = values(c.query_heads, 4);
  }
  at::Tensor query, key, value, doutput;
};

struct Outcome {
  AttentionOutput forward;
  AttentionGradients gradients;
};

Outcome RunComposite(const Case& c, const Setting& setting) {
  Inputs in(c, setting);
  in.query.mul_(c.scale);
  Outcome out;
  out.forward = CausalAttentionForward(in.query, in.key, in.value, c.cu_seqlens, {.window = c.window});
  out.gradients = CausalAttentionBackward(in.doutput, in.query, in.key, in.value, out.forward,
                                          c.cu_seqlens, {.window = c.window});
  out.gradients.query_TNd.mul_(c.scale);
  return out;
}

Outcome RunGpu(const Case& c, bool portable) {
  const Inputs in(c, Gpu());
  const PackedBatch batch = OnGpu(MakePackedBatch(c.cu_seqlens));
  const WideHeadAttentionOptions options = {
      .rule = {.window = c.window,
               .score_scale =
                   c.scale == 1.0 ? 0.0 : c.scale / std::sqrt(static_cast<double>(c.head_size))},
      .portable = portable};
  Outcome out;
  out.forward = WideHeadAttentionForward(in.query, in.key, in.value, batch, options);
  out.gradients = WideHeadAttentionBackward(in.doutput, in.query, in.key, in.value, out.forward,
                                            batch, options);
  return out;
}

// What a case is compared with, computed once.
struct References {
  Outcome composite;
  Outcome exact;
};

const References& ReferencesOf(const Case& c) {
  static std::map<std::string, References> by_name;
  const auto found = by_name.find(c.name);
  if (found != by_name.end()) return found->second;
  return by_name[c.name] = {.composite = RunComposite(c, Composite()),
                            .exact = RunComposite(c, Exact())};
}

std::vector<Case> Cases() {
  const std::vector<int64_t> lengths = {0, 1, 30, 30, 158, 159, 701};
  return {
      {.name = "8 heads a group", .cu_seqlens = lengths, .scale = 4.0},
      {.name = "one head a group", .query_heads = 3, .kv_heads = 3, .cu_seqlens = lengths},
      {.name = "one token", .cu_seqlens = {0, 1}},
      {.name = "documents of one token", .query_heads = 8, .kv_heads = 1,
       .cu_seqlens = {0, 1, 2, 3}},
      {.name = "narrow window", .cu_seqlens = lengths, .window = 37},
      {.name = "window of one", .query_heads = 4, .cu_seqlens = lengths, .window = 1},
      {.name = "256 wide, window", .kv_heads = 8, .head_size = 256, .cu_seqlens = {0, 700, 1501},
       .window = 300},
      {.name = "72 wide", .query_heads = 6, .head_size = 72, .cu_seqlens = lengths},
      // Three blocks of queries, the second one cut at the document's end.
      {.name = "query blocks", .cu_seqlens = {0, 1001, 1400, 1411}, .scale = 0.5},
      // Two blocks of queries and of keys.
      {.name = "key blocks", .query_heads = 2, .kv_heads = 1, .cu_seqlens = {0, 7, 4907, 5003}},
      {.name = "key blocks, window", .query_heads = 2, .kv_heads = 1, .cu_seqlens = {0, 6001},
       .window = 4300},
      // The greatest score rises by much more than kSoftmaxHeadroom, within a block and from one to
      // the next.
      {.name = "rising scores", .query_heads = 2, .kv_heads = 1, .cu_seqlens = {0, 300, 5003},
       .scale = 4.0, .growth = 16.0},
  };
}

class WideHeadAttentionTest : public ::testing::TestWithParam<bool> {
 protected:
  bool portable() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Instructions, WideHeadAttentionTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "Portable" : "Newest"; });

TEST_P(WideHeadAttentionTest, IsAsNearToTheTruthAsTheComposite) {
  for (const Case& c : Cases()) {
    // Its fresh tensors are NaN: nothing may be read before it is written.
    const DeterministicMode mode;
    const Outcome gpu = RunGpu(c, portable());
    const auto& [composite, exact] = ReferencesOf(c);
    Comparison comparison(c.name);
    comparison.Add("o", gpu.forward.output_TNd, composite.forward.output_TNd,
                   exact.forward.output_TNd);
    if (SeeOnlyThemselves(c)) {
      // Scores make no difference then: what is left of their gradients is FP32's rounding of 0.
      EXPECT_LT(gpu.gradients.query_TNd.abs().max().item<float>(), 1e-3f) << c.name;
      EXPECT_LT(gpu.gradients.key_TGd.abs().max().item<float>(), 1e-3f) << c.name;
    } else {
      comparison.Add("dq", gpu.gradients.query_TNd, composite.gradients.query_TNd,
                     exact.gradients.query_TNd);
      comparison.Add("dk", gpu.gradients.key_TGd, composite.gradients.key_TGd,
                     exact.gradients.key_TGd);
    }
    comparison.Add("dv", gpu.gradients.value_TGd, composite.gradients.value_TGd,
                   exact.gradients.value_TGd);
    // Scores are FP32 sums of as many products as a head is wide, which tensor cores truncate.
    ExpectNear(gpu.forward.logsumexp_TN.to(exact.forward.logsumexp_TN.options()),
               exact.forward.logsumexp_TN, 3e-6, c.name + " log-sum-exp");
  }
}

TEST_P(WideHeadAttentionTest, IsTheSameInEveryRun) {
  const Case c = {.cu_seqlens = {0, 5, 1300, 2111}};
  const Outcome first = RunGpu(c, portable()), second = RunGpu(c, portable());
  EXPECT_TRUE(BitEqual(first.forward.output_TNd, second.forward.output_TNd));
  EXPECT_TRUE(BitEqual(first.forward.logsumexp_TN, second.forward.logsumexp_TN));
  EXPECT_TRUE(BitEqual(first.gradients.query_TNd, second.gradients.query_TNd));
  EXPECT_TRUE(BitEqual(first.gradients.key_TGd, second.gradients.key_TGd));
  EXPECT_TRUE(BitEqual(first.gradients.value_TGd, second.gradients.value_TGd));
}

// Beside its results it takes no more memory than it says, however long the document.
TEST_P(WideHeadAttentionTest, KeepsToItsScratch) {
  const Case c = {.cu_seqlens = {0, 9001}};
  const WideHeadAttentionShape shape = {.tokens = c.cu_seqlens.back(),
                                        .query_heads = c.query_heads,
                                        .kv_heads = c.kv_heads,
                                        .head_size = c.head_size};
  const Inputs in(c, Gpu());
  const PackedBatch batch = OnGpu(MakePackedBatch(c.cu_seqlens));
  const WideHeadAttentionOptions options = {.portable = portable()};
  const auto allocated = [](bool peak) {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    return peak ? stats.allocated_bytes[0].peak : stats.allocated_bytes[0].current;
  };
  // Of LibTorch's allocator, which rounds, and of cuBLAS's workspace.
  constexpr int64_t kSlackBytes = int64_t{40} << 20;
  const auto expect_within = [&](int64_t bytes, const auto& run) {
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    const int64_t before = allocated(/*peak=*/false);
    const int64_t results = run();
    EXPECT_LE(allocated(/*peak=*/true) - before, bytes + results + kSlackBytes);
  };
  AttentionOutput forward;
  expect_within(WideHeadAttentionForwardScratchBytes(shape), [&]() -> int64_t {
    forward = WideHeadAttentionForward(in.query, in.key, in.value, batch, options);
    return forward.output_TNd.nbytes() + forward.logsumexp_TN.nbytes();
  });
  expect_within(WideHeadAttentionBackwardScratchBytes(shape), [&]() -> int64_t {
    const AttentionGradients gradients = WideHeadAttentionBackward(
        in.doutput, in.query, in.key, in.value, forward, batch, options);
    return gradients.query_TNd.nbytes() + gradients.key_TGd.nbytes() +
           gradients.value_TGd.nbytes();
  });
}

}  // namespace
}  // namespace oom::testing
