#include "runtime/ops/blocked_attention.h"

#include <algorithm>
#include <limits>

#include "runtime/ops/precision.h"

namespace oom {
namespace {

// Query rows [first, first + rows) and the keys that any of them sees.
struct Block {
  int64_t first;
  int64_t rows;
  int64_t first_key;
  int64_t keys;
};

// Calls visit(block) from the first query row to the last.
template <class Visit>
void ForEachBlock(const at::Tensor& query_BNSd, const BlockedAttentionOptions& options,
                  const Visit& visit) {
  const int64_t length = query_BNSd.size(2);
  const int64_t row_elements = query_BNSd.size(0) * query_BNSd.size(1) * length;
  const int64_t most_rows =
      std::max<int64_t>(1, options.block_elements / std::max<int64_t>(1, row_elements));
  for (int64_t first = 0; first < length; first += most_rows) {
    const int64_t rows = std::min(most_rows, length - first);
    const int64_t first_key =
        options.rule.window > 0 ? std::max<int64_t>(0, first - options.rule.window + 1) : 0;
    visit(Block{first, rows, first_key, first + rows - first_key});
  }
}

// The query heads of a group are rows of one product: [B * G, N / G * rows, d], wide.
at::Tensor QueryRows(const at::Tensor& x_BNSd, int64_t groups, const Block& block) {
  return Wide(x_BNSd.narrow(2, block.first, block.rows))
      .reshape({x_BNSd.size(0) * groups, x_BNSd.size(1) / groups * block.rows, x_BNSd.size(3)});
}

// [B * G, S, d], wide.
at::Tensor AllKeys(const at::Tensor& x_BGSd) {
  return Wide(x_BGSd).reshape({x_BGSd.size(0) * x_BGSd.size(1), x_BGSd.size(2), x_BGSd.size(3)});
}

// s of a block, minus infinity where a row does not see a key: [B * G, N / G * rows, keys].
at::Tensor Scores(const at::Tensor& query_rows, const at::Tensor& keys, double scale,
                  int64_t window, const Block& block) {
  at::Tensor scores = at::bmm(query_rows, keys.transpose(1, 2)).mul_(scale);
  const at::TensorOptions index = scores.options().dtype(at::kLong);
  const at::Tensor row = at::arange(block.first, block.first + block.rows, index).unsqueeze(1);
  const at::Tensor key = at::arange(block.first_key, block.first_key + block.keys, index);
  at::Tensor hidden = key.gt(row);
  if (window > 0) hidden.logical_or_(key.le(row.sub(window)));
  scores.view({-1, block.rows, block.keys})
      .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  return scores;
}

// Back to [B, N, rows, ...] of the block in `all`.
void PlaceRows(const at::Tensor& rows, const Block& block, at::Tensor* all) {
  at::Tensor place = all->narrow(2, block.first, block.rows);
  place.copy_(rows.view(place.sizes()));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> BlockedAttentionForward(const at::Tensor& query_BNSd,
                                                           const at::Tensor& key_BGSd,
                                                           const at::Tensor& value_BGSd,
                                                           const BlockedAttentionOptions& options) {
  const int64_t groups = key_BGSd.size(1);
  const at::Tensor keys = AllKeys(key_BGSd);
  const at::Tensor values = AllKeys(value_BGSd);
  at::Tensor output = at::empty_like(query_BNSd);
  at::Tensor logsumexp = at::empty(query_BNSd.sizes().slice(0, 3), keys.options());
  ForEachBlock(query_BNSd, options, [&](const Block& block) {
    at::Tensor scores =
        Scores(QueryRows(query_BNSd, groups, block), keys.narrow(1, block.first_key, block.keys),
               options.rule.ScaleOf(query_BNSd.size(3)), options.rule.window, block);
    const at::Tensor sums = at::logsumexp(scores, 2, /*keepdim=*/true);
    const at::Tensor probabilities = scores.sub_(sums).exp_();
    PlaceRows(sums, block, &logsumexp);
    PlaceRows(at::bmm(probabilities, values.narrow(1, block.first_key, block.keys)), block,
              &output);
  });
  return {output, logsumexp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> BlockedAttentionBackward(
    const at::Tensor& doutput_BNSd, const at::Tensor& query_BNSd, const at::Tensor& key_BGSd,
    const at::Tensor& value_BGSd, const at::Tensor& output_BNSd, const at::Tensor& logsumexp_BNS,
    const BlockedAttentionOptions& options) {
  const int64_t groups = key_BGSd.size(1);
  const double scale = options.rule.ScaleOf(query_BNSd.size(3));
  const at::Tensor keys = AllKeys(key_BGSd);
  const at::Tensor values = AllKeys(value_BGSd);
  at::Tensor dkeys = at::zeros_like(keys);
  at::Tensor dvalues = at::zeros_like(values);
  at::Tensor dquery = at::empty_like(query_BNSd);
  ForEachBlock(query_BNSd, options, [&](const Block& block) {
    const at::Tensor query_rows = QueryRows(query_BNSd, groups, block);
    const at::Tensor doutput_rows = QueryRows(doutput_BNSd, groups, block);
    const at::Tensor block_keys = keys.narrow(1, block.first_key, block.keys);
    const at::Tensor block_values = values.narrow(1, block.first_key, block.keys);
    const at::Tensor sums = QueryRows(logsumexp_BNS.unsqueeze(3), groups, block);
    const at::Tensor probabilities =
        Scores(query_rows, block_keys, scale, options.rule.window, block).sub_(sums).exp_();
    dvalues.narrow(1, block.first_key, block.keys)
        .add_(at::bmm(probabilities.transpose(1, 2), doutput_rows));
    const at::Tensor mean =
        at::mul(doutput_rows, QueryRows(output_BNSd, groups, block)).sum(2, /*keepdim=*/true);
    const at::Tensor dscores = at::bmm(doutput_rows, block_values.transpose(1, 2))
                                   .sub_(mean)
                                   .mul_(probabilities)
                                   .mul_(scale);
    PlaceRows(at::bmm(dscores, block_keys), block, &dquery);
    dkeys.narrow(1, block.first_key, block.keys).add_(at::bmm(dscores.transpose(1, 2), query_rows));
  });
  return {dquery, dkeys.view(key_BGSd.sizes()).to(key_BGSd.scalar_type()),
          dvalues.view(value_BGSd.sizes()).to(value_BGSd.scalar_type())};
}

}  // namespace oom
