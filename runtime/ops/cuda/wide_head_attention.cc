#include "runtime/ops/cuda/wide_head_attention.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/check.h"
#include "runtime/kernels/attention_scores.h"
#include "runtime/ops/cuda/cuda_tensors.h"

namespace oom {
namespace {

// Rows of all heads that a block of queries has, at most. With 512 columns of the result, 128 tiles
// of 128 x 256: about one for each multiprocessor.
constexpr int64_t kBlockRows = 8192;
constexpr int64_t kStrideMultiple = 8;

int64_t RoundUp(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

int64_t BlockTokens(int64_t query_heads) {
  const int64_t tokens = std::max<int64_t>(1, kBlockRows / query_heads);
  constexpr int64_t kWhole = 64;
  return tokens > kWhole ? tokens / kWhole * kWhole : tokens;
}

// Query tokens [first_token, first_token + tokens), and the first key that any of them sees.
struct QueryBlock {
  int64_t first_token = 0;
  int64_t tokens = 0;
  int64_t first_key = 0;

  int64_t keys() const { return first_token + tokens - first_key; }
};

// What the products and kernels of one call share.
class Blocks {
 public:
  Blocks(const at::Tensor& query_TNd, const at::Tensor& key_TGd, const PackedBatch& batch,
         const WideHeadAttentionOptions& options)
      : batch_(batch),
        tokens_(query_TNd.size(0)),
        groups_(key_TGd.size(1)),
        heads_of_group_(query_TNd.size(1) / groups_),
        head_size_(query_TNd.size(2)),
        window_(options.window),
        scale_(options.scale > 0.0 ? options.scale
                                   : 1.0 / std::sqrt(static_cast<double>(head_size_))) {
    OOM_CHECK(heads_of_group_ * groups_ == query_TNd.size(1) && key_TGd.size(2) == head_size_);
    OOM_CHECK(head_size_ % 8 == 0 && options.window >= 0 && options.scale >= 0.0);
    OOM_CHECK(!batch.cu_seqlens.empty() && batch.cu_seqlens.front() == 0 &&
              batch.cu_seqlens.back() == tokens_);
  }

  int64_t groups() const { return groups_; }
  int64_t head_size() const { return head_size_; }
  int64_t block_tokens() const { return BlockTokens(groups_ * heads_of_group_); }
  int64_t RowsOf(const QueryBlock& block) const { return heads_of_group_ * block.tokens; }

  // Calls visit(block) from the first token to the last.
  template <class Visit>
  void ForEachQueryBlock(const Visit& visit) const {
    const std::vector<int64_t>& starts = batch_.cu_seqlens;
    for (QueryBlock block; block.first_token < tokens_; block.first_token += block.tokens) {
      const auto end = std::upper_bound(starts.begin(), starts.end(), block.first_token);
      block.first_key = *(end - 1);
      if (window_ > 0) {
        block.first_key = std::max(block.first_key, block.first_token - window_ + 1);
      }
      block.tokens = std::min(block_tokens(), tokens_ - block.first_token);
      // The next document's tokens see nothing of this one: no use dragging them along many keys.
      if (block.first_token - block.first_key >= block_tokens()) {
        block.tokens = std::min(block.tokens, *end - block.first_token);
      }
      visit(block);
    }
  }

  // Calls visit(part) for parts of the block's keys in rising order, all of about one size.
  template <class Visit>
  void ForEachKeyBlock(const QueryBlock& block, const Visit& visit) const {
    const int64_t parts = (block.keys() + kScoreColumnsMax - 1) / kScoreColumnsMax;
    const int64_t most = std::min(kScoreColumnsMax, RoundUp((block.keys() + parts - 1) / parts, 64));
    ScoreBlock part = {.positions_T = DeviceData<int64_t>(batch_.positions),
                       .group_count = groups_,
                       .heads_of_group = heads_of_group_,
                       .rows = RowsOf(block),
                       .first_token = block.first_token,
                       .window = window_,
                       .scale = static_cast<float>(scale_)};
    const int64_t end = block.first_token + block.tokens;
    for (part.first_key = block.first_key; part.first_key < end; part.first_key += part.columns) {
      part.columns = std::min(most, end - part.first_key);
      part.row_stride = RoundUp(part.columns, kStrideMultiple);
      visit(part);
    }
  }

  // For the scores of any block: flat, FP32.
  at::Tensor ScoreScratch(const at::Tensor& query_TNd) const {
    const int64_t rows = groups_ * heads_of_group_ * std::min(block_tokens(), tokens_);
    const int64_t columns =
        std::min(kScoreColumnsMax, RoundUp(std::max<int64_t>(1, tokens_), kStrideMultiple));
    return at::empty({rows * columns}, query_TNd.options().dtype(at::kFloat));
  }

  // The block's queries by group, [G, R, d], of a tensor by token.
  at::Tensor Rows(const at::Tensor& x_TNd, const QueryBlock& block) const {
    return x_TNd.narrow(0, block.first_token, block.tokens)
        .view({block.tokens, groups_, heads_of_group_, head_size_})
        .transpose(0, 1)
        .reshape({groups_, RowsOf(block), head_size_});
  }

  // And back, rounded.
  void PlaceRows(const at::Tensor& rows_GRd, const QueryBlock& block,
                 const at::Tensor& x_TNd) const {
    x_TNd.narrow(0, block.first_token, block.tokens)
        .view({block.tokens, groups_, heads_of_group_, head_size_})
        .copy_(rows_GRd.view({groups_, block.tokens, heads_of_group_, head_size_}).transpose(0, 1));
  }

 private:
  const PackedBatch& batch_;
  const int64_t tokens_;
  const int64_t groups_;
  const int64_t heads_of_group_;
  const int64_t head_size_;
  const int64_t window_;
  const double scale_;
};

// The part's keys, [G, C, d], without a copy.
at::Tensor Keys(const at::Tensor& x_TGd, const ScoreBlock& part) {
  return x_TGd.narrow(0, part.first_key, part.columns).transpose(0, 1);
}

// The part's score matrix in flat scratch: [G, R, C], and what the kernels leave in the two halves
// of its rows' bytes.
struct Scores {
  Scores(const at::Tensor& flat, const ScoreBlock& part)
      : whole(flat.narrow(0, 0, part.group_count * part.rows * part.row_stride)
                  .view({part.group_count, part.rows, part.row_stride})),
        scores_GRC(whole.narrow(2, 0, part.columns)),
        halves(whole.view(at::kBFloat16)),
        first_GRC(halves.narrow(2, 0, part.columns)),
        second_GRC(halves.narrow(2, part.row_stride, part.columns)) {}

  const at::Tensor whole;
  at::Tensor scores_GRC;
  const at::Tensor halves;
  const at::Tensor first_GRC;
  const at::Tensor second_GRC;
};

// sum = or += a @ b, BF16 products added up in FP32.
void Multiply(const at::Tensor& a, const at::Tensor& b, bool add, at::Tensor sum) {
  if (add) {
    at::baddbmm_out(sum, sum, a, b, at::kFloat);
  } else {
    at::bmm_out(sum, a, b, at::kFloat);
  }
}

int64_t BlockRowsOf(const WideHeadAttentionShape& shape) {
  return shape.query_heads * std::min(BlockTokens(shape.query_heads), shape.tokens);
}

int64_t ScoreBytes(const WideHeadAttentionShape& shape) {
  return BlockRowsOf(shape) *
         std::min(kScoreColumnsMax, RoundUp(std::max<int64_t>(1, shape.tokens), kStrideMultiple)) *
         static_cast<int64_t>(sizeof(float));
}

}  // namespace

AttentionOutput WideHeadAttentionForward(const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                         const at::Tensor& value_TGd, const PackedBatch& batch,
                                         const WideHeadAttentionOptions& options) {
  const Blocks blocks(query_TNd, key_TGd, batch, options);
  const at::TensorOptions wide = query_TNd.options().dtype(at::kFloat);
  AttentionOutput result{
      .output_TNd = at::empty_like(query_TNd),
      .logsumexp_TN = at::empty({query_TNd.size(0), query_TNd.size(1)}, wide)};
  const at::Tensor flat = blocks.ScoreScratch(query_TNd);
  blocks.ForEachQueryBlock([&](const QueryBlock& block) {
    const int64_t rows = blocks.RowsOf(block);
    const at::Tensor query_GRd = blocks.Rows(query_TNd, block);
    const at::Tensor maximum_GR = at::empty({blocks.groups(), rows}, wide);
    const at::Tensor sum_GR = at::empty_like(maximum_GR);
    const at::Tensor output_GRd = at::empty({blocks.groups(), rows, blocks.head_size()}, wide);
    const SoftmaxState state = {.maximum_GR = DeviceData<float>(maximum_GR),
                                .sum_GR = DeviceData<float>(sum_GR),
                                .output_GRd = DeviceData<float>(output_GRd),
                                .head_size = blocks.head_size()};
    ScoreBlock last;
    blocks.ForEachKeyBlock(block, [&](const ScoreBlock& part) {
      const bool first = part.first_key == block.first_key;
      const Scores scores(flat, part);
      Multiply(query_GRd, Keys(key_TGd, part).transpose(1, 2), /*add=*/false, scores.scores_GRC);
      SoftmaxOfScores(part, first, DeviceData<float>(flat), state, OperatorStream());
      Multiply(scores.first_GRC, Keys(value_TGd, part), !first, output_GRd);
      last = part;
    });
    FinishSoftmax(last, state, DeviceData<__nv_bfloat16>(result.output_TNd),
                  DeviceData<float>(result.logsumexp_TN), OperatorStream());
  });
  return result;
}

AttentionGradients WideHeadAttentionBackward(const at::Tensor& doutput_TNd,
                                             const at::Tensor& query_TNd,
                                             const at::Tensor& key_TGd, const at::Tensor& value_TGd,
                                             const AttentionOutput& forward,
                                             const PackedBatch& batch,
                                             const WideHeadAttentionOptions& options) {
  const Blocks blocks(query_TNd, key_TGd, batch, options);
  const at::TensorOptions wide = query_TNd.options().dtype(at::kFloat);
  const at::Tensor delta_TN = at::empty({query_TNd.size(0), query_TNd.size(1)}, wide);
  AttentionDelta(delta_TN.numel(), blocks.head_size(), DeviceData<__nv_bfloat16>(doutput_TNd),
                 DeviceData<__nv_bfloat16>(forward.output_TNd), DeviceData<float>(delta_TN),
                 OperatorStream());
  AttentionGradients result{.query_TNd = at::empty_like(query_TNd)};
  const at::Tensor dkey_TGd = at::zeros(key_TGd.sizes(), wide);
  const at::Tensor dvalue_TGd = at::zeros(value_TGd.sizes(), wide);
  const at::Tensor flat = blocks.ScoreScratch(query_TNd);
  const at::Tensor dflat = at::empty_like(flat);
  blocks.ForEachQueryBlock([&](const QueryBlock& block) {
    const at::Tensor query_GRd = blocks.Rows(query_TNd, block);
    const at::Tensor doutput_GRd = blocks.Rows(doutput_TNd, block);
    const at::Tensor dquery_GRd = at::empty(query_GRd.sizes(), wide);
    blocks.ForEachKeyBlock(block, [&](const ScoreBlock& part) {
      const at::Tensor key_GCd = Keys(key_TGd, part);
      const Scores scores(flat, part), dscores(dflat, part);
      Multiply(query_GRd, key_GCd.transpose(1, 2), /*add=*/false, scores.scores_GRC);
      Multiply(doutput_GRd, Keys(value_TGd, part).transpose(1, 2), /*add=*/false,
               dscores.scores_GRC);
      ScoreGradients(part,
                     {.scores_GRC = DeviceData<float>(flat),
                      .dprobabilities_GRC = DeviceData<float>(dflat),
                      .logsumexp_TN = DeviceData<float>(forward.logsumexp_TN),
                      .delta_TN = DeviceData<float>(delta_TN)},
                     OperatorStream());
      Multiply(scores.first_GRC.transpose(1, 2), doutput_GRd, /*add=*/true,
               Keys(dvalue_TGd, part));
      Multiply(scores.second_GRC.transpose(1, 2), query_GRd, /*add=*/true, Keys(dkey_TGd, part));
      Multiply(scores.second_GRC, key_GCd, part.first_key != block.first_key, dquery_GRd);
    });
    blocks.PlaceRows(dquery_GRd, block, result.query_TNd);
  });
  result.key_TGd = dkey_TGd.to(key_TGd.scalar_type());
  result.value_TGd = dvalue_TGd.to(value_TGd.scalar_type());
  return result;
}

int64_t WideHeadAttentionForwardScratchBytes(const WideHeadAttentionShape& shape) {
  // Scores, and by row the query, the output and the two numbers of the softmax.
  return ScoreBytes(shape) + BlockRowsOf(shape) * (shape.head_size * (2 + 4) + 2 * 4);
}

int64_t WideHeadAttentionBackwardScratchBytes(const WideHeadAttentionShape& shape) {
  // Scores and their gradients; by row of a block q, do and dq; dk and dv wide; delta.
  return 2 * ScoreBytes(shape) + BlockRowsOf(shape) * shape.head_size * (2 + 2 + 4) +
         shape.tokens * (2 * shape.kv_heads * shape.head_size + shape.query_heads) * 4;
}

}  // namespace oom
