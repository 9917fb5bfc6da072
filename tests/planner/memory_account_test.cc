// Goal: what a GPU's operators work in is accounted for: Gated DeltaNet's scratch memory, by
// segment where the plan asks for segments; wide heads' scores; capped logits.

#include "planner/memory_account.h"

#include <gtest/gtest.h>

#include "runtime/model/hf_config.h"
#include "runtime/ops/gpu_limits.h"

namespace oom::testing {
namespace {

constexpr BatchShape kBatch = {.micro_batch_sequences = 4, .sequence_length = 8192};

v1::Plan GpuPlan(const ModelDescription& model) {
  v1::Plan plan;
  plan.set_cuda_devices(true);
  plan.set_accumulation(1);
  plan.mutable_partitions()->set_mixture_chunk_tokens(1024);
  plan.mutable_partitions()->set_head_chunk_tokens(1024);
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) plan.add_layers();
  return plan;
}

TEST(OperatorBytes, SegmentsOfGatedDeltaNetTakeLessOfAGpu) {
  const auto model = ReadHfConfig(OOM_SOURCE_DIR "/geometries/qwen3.6-35b-a3b/config.json");
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  v1::Plan plan = GpuPlan(*model);
  const int64_t tokens = kBatch.micro_batch_tokens();
  const int64_t whole = OperatorBytes(*model, plan, kBatch, /*float32=*/false);
  const int64_t scratch = GatedDeltaRuleBackwardBytes(tokens / 64, /*value_heads=*/32);
  EXPECT_GT(whole, 2 * scratch);
  EXPECT_LT(whole, 4 * scratch);
  plan.mutable_partitions()->set_recurrent_segment_tokens(tokens / 2);
  const int64_t halves = OperatorBytes(*model, plan, kBatch, /*float32=*/false);
  EXPECT_GT(whole - halves, scratch / 2);
}

TEST(OperatorBytes, WideHeadsTakeTheirBlocksInPlaceOfCudnnsSums) {
  const auto read = ReadHfConfig(OOM_SOURCE_DIR "/geometries/qwen3-30b-a3b/config.json");
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  // The same widths in other heads.
  const auto bytes_with = [&](int64_t query_heads, int64_t kv_heads, int64_t head_size) {
    ModelDescription model = *read;
    for (LayerDescription& layer : model.layers) {
      layer.attention.query_head_count = query_heads;
      layer.attention.kv_head_count = kv_heads;
      layer.attention.head_size = head_size;
    }
    return OperatorBytes(model, GpuPlan(model), kBatch, /*float32=*/false);
  };
  const int64_t tokens = kBatch.micro_batch_tokens();
  ASSERT_EQ(tokens, kCudnnBackwardTokens);
  const int64_t sums = tokens * 4096 * 12;
  const int64_t blocks = WideHeadAttentionBackwardScratchBytes(
      {.tokens = tokens, .query_heads = 8, .kv_heads = 1, .head_size = 512});
  const int64_t logsumexp = tokens * (16 - 8) * 4;
  EXPECT_EQ(bytes_with(16, 2, 256) - bytes_with(8, 1, 512), sums - blocks + logsumexp);
}

TEST(OperatorBytes, CappedLogitsTakeTheirOwnBytesAlone) {
  const auto model = ReadHfConfig(OOM_SOURCE_DIR "/geometries/gemma4-26b-a4b/config.json");
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  const auto bytes_with = [&](int64_t head_chunk) {
    v1::Plan plan = GpuPlan(*model);
    plan.mutable_partitions()->set_head_chunk_tokens(head_chunk);
    return OperatorBytes(*model, plan, kBatch, /*float32=*/false);
  };
  const int64_t tokens = kBatch.micro_batch_tokens();
  EXPECT_EQ(bytes_with(tokens) - bytes_with(tokens / 2), tokens / 2 * model->vocabulary_size * 2);
}

}  // namespace
}  // namespace oom::testing
