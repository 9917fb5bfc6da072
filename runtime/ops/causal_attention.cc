#include "runtime/ops/causal_attention.h"

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "runtime/base/check.h"
#include "runtime/ops/blocked_attention.h"
#include "runtime/ops/precision.h"

namespace oom {
namespace {

// Consecutive documents of one length.
struct Run {
  int64_t first_token = 0;
  int64_t documents = 0;
  int64_t length = 0;

  int64_t tokens() const { return documents * length; }
  // The run's rows of [T, N, ...] as [documents, N, length, ...], without a copy.
  at::Tensor Batch(const at::Tensor& x) const {
    const at::Tensor rows = x.narrow(0, first_token, tokens());
    return (x.dim() == 3 ? rows.view({documents, length, x.size(1), x.size(2)})
                         : rows.view({documents, length, x.size(1)}))
        .transpose(1, 2);
  }
};

std::vector<Run> FindRuns(const std::vector<int64_t>& cu_seqlens, int64_t tokens) {
  OOM_CHECK(!cu_seqlens.empty() && cu_seqlens.front() == 0 && cu_seqlens.back() == tokens);
  std::vector<Run> runs;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    const int64_t length = cu_seqlens[i] - cu_seqlens[i - 1];
    OOM_CHECK(length >= 0);
    if (length == 0) continue;
    if (!runs.empty() && runs.back().length == length) {
      ++runs.back().documents;
    } else {
      runs.push_back({.first_token = cu_seqlens[i - 1], .documents = 1, .length = length});
    }
  }
  return runs;
}

// Null while the window covers the whole document: then causality alone decides.
std::optional<at::Tensor> WindowMask(const Run& run, int64_t window, const at::Tensor& like) {
  if (window <= 0 || window >= run.length) return std::nullopt;
  const at::Tensor allowed =
      at::ones({run.length, run.length}, like.options().dtype(at::kBool)).tril_().triu_(1 - window);
  return at::zeros({run.length, run.length}, like.options())
      .masked_fill_(allowed.logical_not_(), -std::numeric_limits<double>::infinity());
}

// One run. LibTorch's fused kernel is the CPU's alone.
std::tuple<at::Tensor, at::Tensor> RunForward(const Run& run, const at::Tensor& query,
                                              const at::Tensor& key, const at::Tensor& value,
                                              const AttentionRule& rule) {
  if (!query.is_cpu()) {
    return BlockedAttentionForward(run.Batch(query), run.Batch(key), run.Batch(value),
                                   {.rule = rule});
  }
  const std::optional<at::Tensor> mask = WindowMask(run, rule.window, query);
  return at::_scaled_dot_product_flash_attention_for_cpu(
      run.Batch(query), run.Batch(key), run.Batch(value), /*dropout_p=*/0.0,
      /*is_causal=*/!mask.has_value(), mask, rule.ScaleOf(query.size(2)));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> RunBackward(
    const Run& run, const at::Tensor& doutput, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const AttentionOutput& forward, const AttentionRule& rule) {
  if (!query.is_cpu()) {
    return BlockedAttentionBackward(run.Batch(doutput), run.Batch(query), run.Batch(key),
                                    run.Batch(value), run.Batch(forward.output_TNd),
                                    run.Batch(forward.logsumexp_TN), {.rule = rule});
  }
  const std::optional<at::Tensor> mask = WindowMask(run, rule.window, query);
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      run.Batch(doutput), run.Batch(query), run.Batch(key), run.Batch(value),
      run.Batch(forward.output_TNd), run.Batch(forward.logsumexp_TN), /*dropout_p=*/0.0,
      /*is_causal=*/!mask.has_value(), mask, rule.ScaleOf(query.size(2)));
}

// LibTorch's grouped-query kernel adds the key and value gradients of a group in the tensors' own
// type. Where that is narrow, each query head gets its own copy and the group is added up wide.
bool MustExpandGroups(const at::Tensor& query, const at::Tensor& key) {
  return query.is_cpu() && query.size(1) != key.size(1) &&
         query.scalar_type() != WideType(query.scalar_type());
}

at::Tensor ExpandGroups(const at::Tensor& x_TGd, int64_t group) {
  return x_TGd.unsqueeze(2)
      .expand({x_TGd.size(0), x_TGd.size(1), group, x_TGd.size(2)})
      .reshape({x_TGd.size(0), x_TGd.size(1) * group, x_TGd.size(2)});
}

at::Tensor SumGroups(const at::Tensor& x_TNd, int64_t group) {
  return x_TNd.view({x_TNd.size(0), x_TNd.size(1) / group, group, x_TNd.size(2)})
      .sum(2, /*keepdim=*/false, WideType(x_TNd.scalar_type()))
      .to(x_TNd.scalar_type());
}

// Puts a run's [documents, N, length, ...] into its rows of `all`; a single run becomes `all`
// itself.
void PlaceRun(const Run& run, const at::Tensor& part, int64_t tokens, at::Tensor* all) {
  const at::Tensor rows = part.transpose(1, 2).flatten(0, 1);
  if (run.tokens() == tokens) {
    *all = rows.contiguous();
    return;
  }
  if (!all->defined()) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = tokens;
    *all = at::empty(sizes, rows.options());
  }
  all->narrow(0, run.first_token, run.tokens()).copy_(rows);
}

}  // namespace

double AttentionRule::ScaleOf(int64_t head_size) const {
  return score_scale != 0.0 ? score_scale : 1.0 / std::sqrt(static_cast<double>(head_size));
}

AttentionRule RuleOf(const AttentionDescription& attention) {
  return {.window = attention.sliding_window, .score_scale = attention.score_scale};
}

AttentionOutput CausalAttentionForward(const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                       const at::Tensor& value_TGd,
                                       const std::vector<int64_t>& cu_seqlens,
                                       const AttentionRule& rule) {
  const int64_t tokens = query_TNd.size(0);
  AttentionOutput result;
  for (const Run& run : FindRuns(cu_seqlens, tokens)) {
    const auto [output, logsumexp] = RunForward(run, query_TNd, key_TGd, value_TGd, rule);
    PlaceRun(run, output, tokens, &result.output_TNd);
    PlaceRun(run, logsumexp, tokens, &result.logsumexp_TN);
  }
  return result;
}

AttentionGradients CausalAttentionBackward(const at::Tensor& doutput_TNd,
                                           const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                           const at::Tensor& value_TGd,
                                           const AttentionOutput& forward,
                                           const std::vector<int64_t>& cu_seqlens,
                                           const AttentionRule& rule) {
  const int64_t tokens = query_TNd.size(0);
  const int64_t group = query_TNd.size(1) / key_TGd.size(1);
  const bool expand = MustExpandGroups(query_TNd, key_TGd);
  const at::Tensor key = expand ? ExpandGroups(key_TGd, group) : key_TGd;
  const at::Tensor value = expand ? ExpandGroups(value_TGd, group) : value_TGd;
  AttentionGradients result;
  for (const Run& run : FindRuns(cu_seqlens, tokens)) {
    const auto [dquery, dkey, dvalue] =
        RunBackward(run, doutput_TNd, query_TNd, key, value, forward, rule);
    PlaceRun(run, dquery, tokens, &result.query_TNd);
    PlaceRun(run, dkey, tokens, &result.key_TGd);
    PlaceRun(run, dvalue, tokens, &result.value_TGd);
  }
  if (expand) {
    result.key_TGd = SumGroups(result.key_TGd, group);
    result.value_TGd = SumGroups(result.value_TGd, group);
  }
  return result;
}

}  // namespace oom
