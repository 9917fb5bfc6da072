#include "runtime/ops/cuda/attention_cuda.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "runtime/base/check.h"
#include "runtime/kernels/grouped_weight_gradient.h"
#include "runtime/ops/cuda/wide_head_attention.h"
#include "runtime/ops/gpu_limits.h"

namespace oom {
namespace {

// cuDNN compiles a plan for every length it meets; short documents are not worth one.
constexpr int64_t kShortestForCudnn = 128;
constexpr int64_t kTokensOfABlock = 128;
// Wider heads cuDNN takes on Hopper alone; its 9.19 is trusted with them for documents of whole
// blocks only.
constexpr int64_t kPlainHeadSizeMax = 128;
constexpr int64_t kWideHeadLengthMultiple = 128;

bool HasOneLength(const PackedBatch& batch) {
  const std::vector<int64_t>& starts = batch.cu_seqlens;
  for (size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] - starts[i - 1] != batch.longest) return false;
  }
  return true;
}

bool CudnnTakesHeads(int64_t head_size, int64_t document_tokens) {
  return head_size <= kPlainHeadSizeMax ||
         (document_tokens % kWideHeadLengthMultiple == 0 && HasHopperTensorCores());
}

// Forward and backward must agree.
bool TakesCudnn(const PackedBatch& batch, const AttentionRule& rule, int64_t head_size) {
  return batch.longest >= kShortestForCudnn && (rule.window == 0 || rule.window >= batch.longest) &&
         !at::globalContext().deterministicAlgorithms() && HasOneLength(batch) &&
         CudnnTakesHeads(head_size, batch.longest);
}

// [T, N, d] as [B, N, S, d], without a copy.
at::Tensor ByDocument(const at::Tensor& x_TNd, int64_t length) {
  return x_TNd.view({x_TNd.size(0) / length, length, x_TNd.size(1), x_TNd.size(2)}).transpose(1, 2);
}

// And back.
at::Tensor ByToken(const at::Tensor& x_BNSd) {
  return x_BNSd.transpose(1, 2).contiguous().view({-1, x_BNSd.size(1), x_BNSd.size(3)});
}

// Backward by cuDNN of documents of one length.
AttentionGradients CudnnBackward(const at::Tensor& doutput_TNd, const at::Tensor& query_TNd,
                                 const at::Tensor& key_TGd, const at::Tensor& value_TGd,
                                 const AttentionOutput& forward, int64_t length, double scale) {
  // The state of the random numbers that dropout would have used.
  const at::Tensor unused = at::empty({2}, query_TNd.options().dtype(at::kLong));
  const auto [dquery, dkey, dvalue] = at::_scaled_dot_product_cudnn_attention_backward(
      ByDocument(doutput_TNd, length), ByDocument(query_TNd, length), ByDocument(key_TGd, length),
      ByDocument(value_TGd, length), ByDocument(forward.output_TNd, length), forward.logsumexp_TN,
      unused, unused,
      /*attn_bias=*/at::Tensor(), /*cum_seq_q=*/at::Tensor(), /*cum_seq_k=*/at::Tensor(), length,
      length, /*dropout_p=*/0.0, /*is_causal=*/true, scale);
  return {.query_TNd = ByToken(dquery), .key_TGd = ByToken(dkey), .value_TGd = ByToken(dvalue)};
}

// The same a few whole documents at a time: cuDNN takes 12 bytes of workspace for each element of
// the query, since it adds up the gradients of keys and values that heads share in FP32.
AttentionGradients CudnnBackwardInParts(const at::Tensor& doutput_TNd, const at::Tensor& query_TNd,
                                        const at::Tensor& key_TGd, const at::Tensor& value_TGd,
                                        const AttentionOutput& forward, int64_t length,
                                        double scale) {
  const int64_t documents = query_TNd.size(0) / length;
  const int64_t at_once = std::max<int64_t>(1, kCudnnBackwardTokens / length);
  if (documents <= at_once) {
    return CudnnBackward(doutput_TNd, query_TNd, key_TGd, value_TGd, forward, length, scale);
  }
  OOM_CHECK(forward.logsumexp_TN.size(0) == documents);
  AttentionGradients whole{.query_TNd = at::empty_like(query_TNd),
                           .key_TGd = at::empty_like(key_TGd),
                           .value_TGd = at::empty_like(value_TGd)};
  for (int64_t first = 0; first < documents; first += at_once) {
    const int64_t count = std::min(at_once, documents - first);
    const auto part = [&](const at::Tensor& by_token) {
      return by_token.narrow(0, first * length, count * length);
    };
    const AttentionGradients gradients =
        CudnnBackward(part(doutput_TNd), part(query_TNd), part(key_TGd), part(value_TGd),
                      {.output_TNd = part(forward.output_TNd),
                       .logsumexp_TN = forward.logsumexp_TN.narrow(0, first, count)},
                      length, scale);
    part(whole.query_TNd).copy_(gradients.query_TNd);
    part(whole.key_TGd).copy_(gradients.key_TGd);
    part(whole.value_TGd).copy_(gradients.value_TGd);
  }
  return whole;
}

// FlashAttention's arguments beside the tensors.
struct PackedArguments {
  PackedArguments(const PackedBatch& batch, int64_t window)
      : starts(batch.document_starts),
        // Rounded up so that batches share sizes.
        longest((batch.longest + kTokensOfABlock - 1) / kTokensOfABlock * kTokensOfABlock) {
    OOM_CHECK(starts.is_cuda() && starts.scalar_type() == at::kInt);
    if (window > 0 && window < batch.longest) {
      window_left = window - 1;
      window_right = 0;
    }
  }

  at::Tensor starts;
  int64_t longest;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
};

}  // namespace

AttentionOutput CudaAttentionForward(const at::Tensor& query_TNd, const at::Tensor& key_TGd,
                                     const at::Tensor& value_TGd, const PackedBatch& batch,
                                     const AttentionRule& rule) {
  if (query_TNd.size(2) > kFusedHeadSizeMax) {
    return WideHeadAttentionForward(query_TNd, key_TGd, value_TGd, batch, {.rule = rule});
  }
  AttentionOutput result;
  if (TakesCudnn(batch, rule, query_TNd.size(2))) {
    const auto outputs = at::_scaled_dot_product_cudnn_attention(
        ByDocument(query_TNd, batch.longest), ByDocument(key_TGd, batch.longest),
        ByDocument(value_TGd, batch.longest), /*attn_bias=*/std::nullopt,
        /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, /*is_causal=*/true,
        /*return_debug_mask=*/false, rule.ScaleOf(query_TNd.size(2)));
    result.output_TNd = ByToken(std::get<0>(outputs));
    result.logsumexp_TN = std::get<1>(outputs);
    return result;
  }
  const PackedArguments packed(batch, rule.window);
  const auto outputs = at::_flash_attention_forward(
      query_TNd, key_TGd, value_TGd, packed.starts, packed.starts, packed.longest, packed.longest,
      /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false,
      rule.ScaleOf(query_TNd.size(2)), packed.window_left, packed.window_right);
  result.output_TNd = std::get<0>(outputs);
  result.logsumexp_TN = std::get<1>(outputs);
  return result;
}

AttentionGradients CudaAttentionBackward(const at::Tensor& doutput_TNd, const at::Tensor& query_TNd,
                                         const at::Tensor& key_TGd, const at::Tensor& value_TGd,
                                         const AttentionOutput& forward, const PackedBatch& batch,
                                         const AttentionRule& rule) {
  if (query_TNd.size(2) > kFusedHeadSizeMax) {
    return WideHeadAttentionBackward(doutput_TNd, query_TNd, key_TGd, value_TGd, forward, batch,
                                     {.rule = rule});
  }
  if (TakesCudnn(batch, rule, query_TNd.size(2))) {
    return CudnnBackwardInParts(doutput_TNd, query_TNd, key_TGd, value_TGd, forward, batch.longest,
                                rule.ScaleOf(query_TNd.size(2)));
  }
  // FlashAttention takes a mere warning for leave to differ from run to run.
  OOM_CHECK(!at::globalContext().deterministicAlgorithms() ||
            !at::globalContext().deterministicAlgorithmsWarnOnly());
  const PackedArguments packed(batch, rule.window);
  const at::Tensor unused = at::empty({2}, query_TNd.options().dtype(at::kLong));
  AttentionGradients result;
  std::tie(result.query_TNd, result.key_TGd, result.value_TGd) = at::_flash_attention_backward(
      doutput_TNd, query_TNd, key_TGd, value_TGd, forward.output_TNd, forward.logsumexp_TN,
      packed.starts, packed.starts, packed.longest, packed.longest, /*dropout_p=*/0.0,
      /*is_causal=*/true, unused, unused, rule.ScaleOf(query_TNd.size(2)), packed.window_left,
      packed.window_right);
  return result;
}

}  // namespace oom
