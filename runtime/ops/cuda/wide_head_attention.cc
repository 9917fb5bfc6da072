#include "runtime/ops/cuda/wide_head_attention.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/kernels/attention_products.h"
#include "runtime/kernels/attention_scores.h"
#include "runtime/kernels/grouped_weight_gradient.h"
#include "runtime/ops/cuda/cuda_tensors.h"

namespace oom {
namespace {

static_assert(kWideHeadScoreColumns <= kScoreColumnsMax);
constexpr int64_t kHopperHeadSizeMultiple = 64;

int64_t RoundUp(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Query tokens [first_token, first_token + tokens), and the first key that any of them sees.
struct QueryBlock {
  int64_t first_token = 0;
  int64_t tokens = 0;
  int64_t first_key = 0;

  int64_t end() const { return first_token + tokens; }
};

// What the blocks of one call have in common.
class Blocks {
 public:
  // Of about `rows` rows.
  Blocks(const at::Tensor& query_TNd, const at::Tensor& key_TGd, const PackedBatch& batch,
         const WideHeadAttentionOptions& options, int64_t rows)
      : batch_(batch),
        tokens_(query_TNd.size(0)),
        groups_(key_TGd.size(1)),
        heads_of_group_(query_TNd.size(1) / groups_),
        head_size_(query_TNd.size(2)),
        window_(options.rule.window),
        scale_(options.rule.ScaleOf(head_size_)),
        block_tokens_(WideHeadBlockTokens(rows, query_TNd.size(1))) {
    OOM_CHECK(heads_of_group_ * groups_ == query_TNd.size(1) && key_TGd.size(2) == head_size_);
    OOM_CHECK(head_size_ % 8 == 0 && window_ >= 0 && scale_ > 0.0);
    OOM_CHECK(!batch.cu_seqlens.empty() && batch.cu_seqlens.front() == 0 &&
              batch.cu_seqlens.back() == tokens_);
  }

  int64_t groups() const { return groups_; }
  int64_t heads_of_group() const { return heads_of_group_; }
  int64_t head_size() const { return head_size_; }
  int64_t RowsOf(const QueryBlock& block) const { return heads_of_group_ * block.tokens; }
  ScoreProductSizes sizes() const { return {.tokens = tokens_, .head_size = head_size_}; }

  // Of the scores of any block.
  int64_t most_scores() const {
    return groups_ * heads_of_group_ * std::min(block_tokens_, tokens_) * WideHeadColumns(tokens_);
  }

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
      block.tokens = std::min(block_tokens_, tokens_ - block.first_token);
      // The next document's tokens see nothing of this one: no use dragging them along many keys.
      if (block.first_token - block.first_key >= block_tokens_) {
        block.tokens = std::min(block.tokens, *end - block.first_token);
      }
      visit(block);
    }
  }

  // Calls visit(part) for parts of the block's keys in rising order, all of about one size.
  template <class Visit>
  void ForEachKeyBlock(const QueryBlock& block, const Visit& visit) const {
    const int64_t keys = block.end() - block.first_key;
    const int64_t parts = (keys + kWideHeadScoreColumns - 1) / kWideHeadScoreColumns;
    constexpr int64_t kTileColumns = 256;
    const int64_t most = RoundUp((keys + parts - 1) / parts, kTileColumns);
    ScoreBlock part = {.positions_T = DeviceData<int64_t>(batch_.positions),
                       .group_count = groups_,
                       .heads_of_group = heads_of_group_,
                       .rows = RowsOf(block),
                       .first_token = block.first_token,
                       .window = window_,
                       .scale = static_cast<float>(scale_)};
    for (part.first_key = block.first_key; part.first_key < block.end();
         part.first_key += part.columns) {
      part.columns = std::min(most, block.end() - part.first_key);
      part.row_stride = RoundUp(part.columns, kWideHeadStrideMultiple);
      visit(part);
    }
  }

  // The block's queries by group, [G, R, d], of a tensor by token.
  at::Tensor Rows(const at::Tensor& x_TNd, const QueryBlock& block) const {
    return x_TNd.narrow(0, block.first_token, block.tokens)
        .view({block.tokens, groups_, heads_of_group_, head_size_})
        .transpose(0, 1)
        .reshape({groups_, RowsOf(block), head_size_})
        .contiguous();  // With one head a group reshaping alone copies nothing.
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
  const int64_t block_tokens_;
};

bool TakesHopper(const at::Tensor& query_TNd, const WideHeadAttentionOptions& options) {
  return !options.portable && query_TNd.size(2) % kHopperHeadSizeMultiple == 0 &&
         HasHopperTensorCores();
}

// The part's keys, [G, C, d], without a copy.
at::Tensor Keys(const at::Tensor& x_TGd, const ScoreBlock& part) {
  return x_TGd.narrow(0, part.first_key, part.columns).transpose(0, 1);
}

// sum = or += a @ b, BF16 products added up in FP32.
void Multiply(const at::Tensor& a, const at::Tensor& b, bool add, at::Tensor sum) {
  if (add) {
    at::baddbmm_out(sum, sum, a, b, at::kFloat);
  } else {
    at::bmm_out(sum, a, b, at::kFloat);
  }
}

// [G, R, row_stride] at the start of flat scratch.
at::Tensor Matrix(const at::Tensor& flat, const ScoreBlock& part) {
  return flat.narrow(0, 0, part.group_count * part.rows * part.row_stride)
      .view({part.group_count, part.rows, part.row_stride});
}

// rows [G, R, d] times keys, into scratch: [G, R, row_stride] FP32, of which C columns are written.
at::Tensor ScoreProduct(const at::Tensor& rows_GRd, const at::Tensor& key_TGd,
                        const ScoreBlock& part, const at::Tensor& flat) {
  at::Tensor scores = Matrix(flat, part);
  Multiply(rows_GRd, Keys(key_TGd, part).transpose(1, 2), /*add=*/false,
           scores.narrow(2, 0, part.columns));
  return scores;
}

// P of forward, [G, R, C] BF16; the state follows.
at::Tensor Probabilities(const Blocks& blocks, const ScoreBlock& part, bool first,
                         const at::Tensor& query_GRd, const at::Tensor& key_TGd, bool hopper,
                         const at::Tensor& flat, const SoftmaxState& state) {
  if (hopper) {
    at::Tensor probabilities = Matrix(flat.view(at::kBFloat16), part);
    SoftmaxOfProducts(part, blocks.sizes(),
                      {.rows_GRd = DeviceData<__nv_bfloat16>(query_GRd),
                       .keys_TGd = DeviceData<__nv_bfloat16>(key_TGd)},
                      first, DeviceData<__nv_bfloat16>(probabilities), state, OperatorStream());
    return probabilities.narrow(2, 0, part.columns);
  }
  const at::Tensor scores = ScoreProduct(query_GRd, key_TGd, part, flat);
  SoftmaxOfScores(part, first, DeviceData<float>(scores), state, OperatorStream());
  return scores.view(at::kBFloat16).narrow(2, 0, part.columns);
}

// What backward multiplies with.
struct BackwardTensors {
  at::Tensor query_GRd;
  at::Tensor doutput_GRd;
  at::Tensor key_TGd;
  at::Tensor value_TGd;
  at::Tensor logsumexp_TN;
  at::Tensor delta_TN;
};

// P and dS, [G, R, C] BF16.
std::pair<at::Tensor, at::Tensor> Gradients(const Blocks& blocks, const ScoreBlock& part,
                                            const BackwardTensors& in, bool hopper,
                                            const at::Tensor& flat, const at::Tensor& dflat) {
  if (hopper) {
    const at::Tensor probabilities = Matrix(flat.view(at::kBFloat16), part);
    const at::Tensor dscores = Matrix(dflat.view(at::kBFloat16), part);
    GradientsOfProducts(part, blocks.sizes(),
                        {.scores = {.rows_GRd = DeviceData<__nv_bfloat16>(in.query_GRd),
                                    .keys_TGd = DeviceData<__nv_bfloat16>(in.key_TGd)},
                         .dprobabilities = {.rows_GRd = DeviceData<__nv_bfloat16>(in.doutput_GRd),
                                            .keys_TGd = DeviceData<__nv_bfloat16>(in.value_TGd)},
                         .logsumexp_TN = DeviceData<float>(in.logsumexp_TN),
                         .delta_TN = DeviceData<float>(in.delta_TN),
                         .probabilities_GRC = DeviceData<__nv_bfloat16>(probabilities),
                         .dscores_GRC = DeviceData<__nv_bfloat16>(dscores)},
                        OperatorStream());
    return {probabilities.narrow(2, 0, part.columns), dscores.narrow(2, 0, part.columns)};
  }
  const at::Tensor scores = ScoreProduct(in.query_GRd, in.key_TGd, part, flat);
  const at::Tensor dprobabilities = ScoreProduct(in.doutput_GRd, in.value_TGd, part, dflat);
  ScoreGradients(part,
                 {.scores_GRC = DeviceData<float>(scores),
                  .dprobabilities_GRC = DeviceData<float>(dprobabilities),
                  .logsumexp_TN = DeviceData<float>(in.logsumexp_TN),
                  .delta_TN = DeviceData<float>(in.delta_TN)},
                 OperatorStream());
  const at::Tensor halves = scores.view(at::kBFloat16);
  return {halves.narrow(2, 0, part.columns), halves.narrow(2, part.row_stride, part.columns)};
}

}  // namespace

AttentionOutput WideHeadAttentionForward(const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                         const at::Tensor& value_TGd, const PackedBatch& batch,
                                         const WideHeadAttentionOptions& options) {
  const bool hopper = TakesHopper(query_TNd, options);
  const Blocks blocks(query_TNd, key_TGd, batch, options,
                      hopper ? kWideHeadSoftmaxRows : kWideHeadProductRows);
  const int64_t product_tokens = WideHeadBlockTokens(kWideHeadProductRows, query_TNd.size(1));
  const at::TensorOptions wide = query_TNd.options().dtype(at::kFloat);
  AttentionOutput result{
      .output_TNd = at::empty_like(query_TNd),
      .logsumexp_TN = at::empty({query_TNd.size(0), query_TNd.size(1)}, wide)};
  // Probabilities alone take half of the room.
  const at::Tensor flat = at::empty({blocks.most_scores() / (hopper ? 2 : 1)}, wide);
  blocks.ForEachQueryBlock([&](const QueryBlock& block) {
    const at::Tensor query_GRd = blocks.Rows(query_TNd, block);
    const at::Tensor sums = at::empty({3, blocks.groups(), blocks.RowsOf(block)}, wide);
    const at::Tensor output_GRd = at::empty(query_GRd.sizes(), wide);
    const SoftmaxState state = {.maximum_GR = DeviceData<float>(sums[0]),
                                .sum_GR = DeviceData<float>(sums[1]),
                                .weight_GR = DeviceData<float>(sums[2]),
                                .output_GRd = DeviceData<float>(output_GRd),
                                .head_size = blocks.head_size()};
    ScoreBlock last;
    blocks.ForEachKeyBlock(block, [&](const ScoreBlock& part) {
      last = part;
      const bool first = part.first_key == block.first_key;
      const at::Tensor probabilities_GRC =
          Probabilities(blocks, part, first, query_GRd, key_TGd, hopper, flat, state);
      const at::Tensor value_GCd = Keys(value_TGd, part);
      for (int64_t token = 0; token < block.tokens; token += product_tokens) {
        const int64_t end = std::min(token + product_tokens, block.tokens);
        // Behind these tokens all probabilities are 0.
        const int64_t columns =
            std::min(part.columns, block.first_token + end - part.first_key);
        if (columns <= 0) continue;
        const auto rows = [&](const at::Tensor& x) {
          return x.narrow(1, token * blocks.heads_of_group(),
                          (end - token) * blocks.heads_of_group());
        };
        Multiply(rows(probabilities_GRC).narrow(2, 0, columns), value_GCd.narrow(1, 0, columns),
                 !first, rows(output_GRd));
      }
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
  const bool hopper = TakesHopper(query_TNd, options);
  const Blocks blocks(query_TNd, key_TGd, batch, options, kWideHeadProductRows);
  const at::TensorOptions wide = query_TNd.options().dtype(at::kFloat);
  const at::Tensor delta_TN = at::empty(forward.logsumexp_TN.sizes(), wide);
  AttentionDelta(delta_TN.numel(), blocks.head_size(), DeviceData<__nv_bfloat16>(doutput_TNd),
                 DeviceData<__nv_bfloat16>(forward.output_TNd), DeviceData<float>(delta_TN),
                 OperatorStream());
  AttentionGradients result{.query_TNd = at::empty_like(query_TNd)};
  const at::Tensor dkey_TGd = at::zeros(key_TGd.sizes(), wide);
  const at::Tensor dvalue_TGd = at::zeros(value_TGd.sizes(), wide);
  const at::Tensor flat = at::empty({blocks.most_scores() / (hopper ? 2 : 1)}, wide);
  const at::Tensor dflat = at::empty_like(flat);
  blocks.ForEachQueryBlock([&](const QueryBlock& block) {
    const BackwardTensors in = {.query_GRd = blocks.Rows(query_TNd, block),
                                .doutput_GRd = blocks.Rows(doutput_TNd, block),
                                .key_TGd = key_TGd,
                                .value_TGd = value_TGd,
                                .logsumexp_TN = forward.logsumexp_TN,
                                .delta_TN = delta_TN};
    const at::Tensor dquery_GRd = at::empty(in.query_GRd.sizes(), wide);
    blocks.ForEachKeyBlock(block, [&](const ScoreBlock& part) {
      const auto [probabilities_GRC, dscores_GRC] =
          Gradients(blocks, part, in, hopper, flat, dflat);
      Multiply(probabilities_GRC.transpose(1, 2), in.doutput_GRd, /*add=*/true,
               Keys(dvalue_TGd, part));
      Multiply(dscores_GRC.transpose(1, 2), in.query_GRd, /*add=*/true, Keys(dkey_TGd, part));
      Multiply(dscores_GRC, Keys(key_TGd, part), part.first_key != block.first_key, dquery_GRd);
    });
    blocks.PlaceRows(dquery_GRd, block, result.query_TNd);
  });
  result.key_TGd = dkey_TGd.to(key_TGd.scalar_type());
  result.value_TGd = dvalue_TGd.to(value_TGd.scalar_type());
  return result;
}

}  // namespace oom
