#include "runtime/ops/gated_delta_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/ops/precision.h"
#include "runtime/ops/segment.h"

namespace oom {
namespace {

struct Span {
  int64_t first;
  int64_t tokens;
};

// Tokens [first, end), cut at multiples of kDeltaChunkTokens.
std::vector<Span> CutIntoChunks(int64_t first, int64_t end) {
  std::vector<Span> chunks;
  while (first < end) {
    const int64_t next = std::min(end, (first / kDeltaChunkTokens + 1) * kDeltaChunkTokens);
    chunks.push_back({first, next - first});
    first = next;
  }
  return chunks;
}

// A chunk's rows by value head, wide, [N, C, d]; key heads are repeated for their value heads.
at::Tensor HeadRows(const at::Tensor& x_TGd, const Span& span, int64_t value_heads) {
  const at::Tensor rows_GCd = Wide(x_TGd.narrow(0, span.first, span.tokens)).transpose(0, 1);
  const int64_t heads = rows_GCd.size(0);
  return rows_GCd.unsqueeze(1)
      .expand({heads, value_heads / heads, span.tokens, rows_GCd.size(2)})
      .reshape({value_heads, span.tokens, rows_GCd.size(2)})
      .contiguous();
}

at::Tensor GateRows(const at::Tensor& x_TN, const Span& span) {
  return Wide(x_TN.narrow(0, span.first, span.tokens)).t().contiguous();
}

void PlaceHeadRows(const at::Tensor& rows_NCd, const Span& span, at::Tensor x_TNd) {
  x_TNd.narrow(0, span.first, span.tokens).copy_(rows_NCd.transpose(0, 1));
}

// Adds the rows up over the value heads of each key head.
void PlaceKeyHeadRows(const at::Tensor& rows_NCK, const Span& span, at::Tensor x_TGK) {
  const int64_t heads = x_TGK.size(1);
  PlaceHeadRows(
      rows_NCK.view({heads, rows_NCK.size(0) / heads, span.tokens, rows_NCK.size(2)}).sum(1), span,
      x_TGK);
}

// What a chunk is before it meets a state, by value head: the header's letters in words.
struct Chunk {
  Chunk(const GatedDeltaRuleInput& input, const Span& span);

  at::Tensor query;         // [N, C, K]
  at::Tensor key;           // [N, C, K]
  at::Tensor value;         // [N, C, V]
  at::Tensor beta;          // [N, 1, C]
  at::Tensor since_start;   // e^G, [N, C, 1]
  at::Tensor until_end;     // e^(G_last - G), [N, C, 1]
  at::Tensor whole;         // e^G_last, [N, 1, 1]
  at::Tensor between;       // D, [N, C, C]
  at::Tensor key_products;  // k k.T, [N, C, C]
  at::Tensor inverse;       // A, [N, C, C]
  at::Tensor write;         // B, [N, C, C]
};

Chunk::Chunk(const GatedDeltaRuleInput& input, const Span& span) {
  const int64_t value_heads = input.value_TNV.size(1);
  query = HeadRows(input.query_TGK, span, value_heads);
  key = HeadRows(input.key_TGK, span, value_heads);
  value = HeadRows(input.value_TNV, span, value_heads);
  beta = GateRows(input.beta_TN, span).unsqueeze(1);

  // In FP64: a difference of two large sums may be a small one, and it is what counts.
  const at::Tensor sum = GateRows(input.log_decay_TN, span).to(at::kDouble).cumsum(1);
  const at::Tensor last = sum.narrow(1, span.tokens - 1, 1);
  const at::ScalarType type = key.scalar_type();
  since_start = at::exp(sum.to(type)).unsqueeze(2);
  until_end = at::exp(at::sub(last, sum).to(type)).unsqueeze(2);
  whole = at::exp(last.to(type)).unsqueeze(2);
  // Hidden before the exponential, which overflows above the diagonal.
  const at::Tensor above =
      at::ones({span.tokens, span.tokens}, sum.options().dtype(at::kBool)).triu_(1);
  between = at::sub(sum.unsqueeze(2), sum.unsqueeze(1))
                .to(type)
                .masked_fill_(above, -std::numeric_limits<double>::infinity())
                .exp_();

  key_products = at::bmm(key, key.transpose(1, 2));
  const at::Tensor lower = at::mul(key_products, beta.transpose(1, 2)).tril_(-1);
  const at::Tensor identity = at::eye(span.tokens, key.options()).expand_as(lower);
  inverse = at::linalg_solve_triangular(lower, identity, /*upper=*/false, /*left=*/true,
                                        /*unitriangular=*/true)
                .contiguous();
  write = at::mul(inverse, between).mul_(beta);
}

double Scale(const GatedDeltaRuleInput& input) {
  return 1.0 / std::sqrt(static_cast<double>(input.query_TGK.size(2)));
}

// The chunk's meeting with the state at its start, [N, K, V].
struct Meeting {
  Meeting(const Chunk& chunk, const at::Tensor& state)
      : read(at::bmm(chunk.key, state)),
        missing(at::addcmul(chunk.value, chunk.since_start, read, -1)),
        written(at::bmm(chunk.write, missing)) {}

  at::Tensor read;     // k S, [N, C, V]
  at::Tensor missing;  // W, [N, C, V]
  at::Tensor written;  // R, [N, C, V]
};

at::Tensor NextState(const Chunk& chunk, const Meeting& meeting, const at::Tensor& state) {
  return at::bmm(chunk.key.transpose(1, 2), at::mul(chunk.until_end, meeting.written))
      .addcmul_(state, chunk.whole);
}

// P.
at::Tensor Scores(const Chunk& chunk, double scale) {
  return at::bmm(chunk.query, chunk.key.transpose(1, 2)).mul_(chunk.between).mul_(scale);
}

void CheckShapes(const GatedDeltaRuleInput& input, const std::vector<int64_t>& cu_seqlens) {
  CheckSegment(cu_seqlens, input.value_TNV.size(0));
  OOM_CHECK(input.query_TGK.sizes() == input.key_TGK.sizes());
  OOM_CHECK(input.value_TNV.size(1) % input.key_TGK.size(1) == 0);
  OOM_CHECK(input.log_decay_TN.sizes() == input.beta_TN.sizes());
  OOM_CHECK(input.beta_TN.sizes() == input.value_TNV.sizes().slice(0, 2));
}

std::vector<int64_t> StateSizes(const GatedDeltaRuleInput& input) {
  return {input.value_TNV.size(1), input.key_TGK.size(2), input.value_TNV.size(2)};
}

at::TensorOptions WideOptions(const at::Tensor& tensor) {
  return tensor.options().dtype(WideType(tensor.scalar_type()));
}

GatedDeltaRuleGradients EmptyGradients(const GatedDeltaRuleInput& input) {
  const auto like = [](const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), WideOptions(tensor));
  };
  GatedDeltaRuleGradients gradients;
  gradients.query_TGK = like(input.query_TGK);
  gradients.key_TGK = like(input.key_TGK);
  gradients.value_TNV = like(input.value_TNV);
  gradients.log_decay_TN = like(input.log_decay_TN);
  gradients.beta_TN = like(input.beta_TN);
  if (input.state_DNKV.defined()) gradients.state_DNKV = like(input.state_DNKV);
  return gradients;
}

// Places the gradients of one chunk; the gradient of its state, given that of the next one.
at::Tensor ChunkBackward(const GatedDeltaRuleInput& input, const Span& span,
                         const at::Tensor& doutput_TNV, const at::Tensor& state,
                         const at::Tensor& dnext, GatedDeltaRuleGradients* gradients) {
  const Chunk chunk(input, span);
  const Meeting meeting(chunk, state);
  const double scale = Scale(input);
  const at::Tensor doutput = HeadRows(doutput_TNV, span, chunk.value.size(0));
  const at::Tensor scores = Scores(chunk, scale);

  const at::Tensor dwritten =
      at::bmm(scores.transpose(1, 2), doutput).addcmul_(at::bmm(chunk.key, dnext), chunk.until_end);
  const at::Tensor dmissing = at::bmm(chunk.write.transpose(1, 2), dwritten);
  const at::Tensor dread = at::mul(dmissing, chunk.since_start).neg_();
  const at::Tensor dscores = at::bmm(doutput, meeting.written.transpose(1, 2));
  const at::Tensor dproducts = at::mul(dscores, chunk.between).mul_(scale);

  // A and what it is the inverse of.
  const at::Tensor dwrite = at::bmm(dwritten, meeting.missing.transpose(1, 2)).mul_(chunk.between);
  const at::Tensor inverse_transposed = chunk.inverse.transpose(1, 2);
  const at::Tensor dlower =
      at::bmm(at::bmm(inverse_transposed, at::mul(dwrite, chunk.beta)), inverse_transposed)
          .neg_()
          .tril_(-1);
  const at::Tensor dkey_products = at::mul(dlower, chunk.beta.transpose(1, 2));

  const at::Tensor query_part =
      at::mul(at::bmm(doutput, state.transpose(1, 2)), chunk.since_start).mul_(scale);
  const at::Tensor key_part =
      at::mul(at::bmm(meeting.written, dnext.transpose(1, 2)), chunk.until_end);
  const at::Tensor dkey =
      at::bmm(dread, state.transpose(1, 2))
          .add_(key_part)
          .baddbmm_(dproducts.transpose(1, 2), chunk.query)
          .baddbmm_(at::add(dkey_products, dkey_products.transpose(1, 2)), chunk.key);
  PlaceKeyHeadRows(at::baddbmm(query_part, dproducts, chunk.key), span, gradients->query_TGK);
  PlaceKeyHeadRows(dkey, span, gradients->key_TGK);
  PlaceHeadRows(dmissing, span, gradients->value_TNV);
  const at::Tensor dbeta =
      at::mul(dwrite, chunk.inverse).sum(1).add_(at::mul(dlower, chunk.key_products).sum(2));
  gradients->beta_TN.narrow(0, span.first, span.tokens).copy_(dbeta.t());

  // Of the running sum G: D_ij counts for i and against j. What a position adds, an earlier one
  // takes away again in the sum over later positions: in FP64 that is exact.
  const auto sum = [](const at::Tensor& terms, int64_t dim) {
    return terms.sum(dim, /*keepdim=*/false, at::kDouble);
  };
  const at::Tensor pairs =
      at::mul(dwrite, chunk.inverse).mul_(chunk.beta).addcmul_(dscores, scores);
  const at::Tensor against_end = sum(at::mul(chunk.key, key_part), 2);
  at::Tensor dsum = sum(at::mul(dread, meeting.read), 2)
                        .add_(sum(at::mul(chunk.query, query_part), 2))
                        .sub_(against_end)
                        .add_(sum(pairs, 2))
                        .sub_(sum(pairs, 1));
  dsum.select(1, span.tokens - 1)
      .add_(against_end.sum(1))
      .add_(at::mul(sum(at::mul(dnext, state).flatten(1), 1), chunk.whole.flatten()));
  gradients->log_decay_TN.narrow(0, span.first, span.tokens)
      .copy_(dsum.flip(1).cumsum(1).flip(1).t());

  return at::bmm(chunk.query.transpose(1, 2), at::mul(doutput, chunk.since_start).mul_(scale))
      .baddbmm_(chunk.key.transpose(1, 2), dread)
      .addcmul_(dnext, chunk.whole);
}

}  // namespace

GatedDeltaRuleOutput GatedDeltaRuleForward(const GatedDeltaRuleInput& input,
                                           const std::vector<int64_t>& cu_seqlens) {
  CheckShapes(input, cu_seqlens);
  const int64_t documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  const std::vector<int64_t> state_sizes = StateSizes(input);
  const double scale = Scale(input);
  GatedDeltaRuleOutput result;
  result.output_TNV = at::empty(input.value_TNV.sizes(), input.value_TNV.options());
  result.state_DNKV = at::empty({documents, state_sizes[0], state_sizes[1], state_sizes[2]},
                                WideOptions(input.value_TNV));
  for (int64_t document = 0; document < documents; ++document) {
    const size_t index = static_cast<size_t>(document);
    at::Tensor state =
        CarriedBy(input.state_DNKV, document, state_sizes, result.state_DNKV.options());
    for (const Span& span : CutIntoChunks(cu_seqlens[index], cu_seqlens[index + 1])) {
      const Chunk chunk(input, span);
      const Meeting meeting(chunk, state);
      const at::Tensor output = at::bmm(chunk.query, state).mul_(chunk.since_start).mul_(scale);
      PlaceHeadRows(at::baddbmm(output, Scores(chunk, scale), meeting.written), span,
                    result.output_TNV);
      state = NextState(chunk, meeting, state);
    }
    result.state_DNKV.select(0, document).copy_(state);
  }
  return result;
}

GatedDeltaRuleGradients GatedDeltaRuleBackward(const at::Tensor& doutput_TNV,
                                               const at::Tensor& dstate_DNKV,
                                               const GatedDeltaRuleInput& input,
                                               const std::vector<int64_t>& cu_seqlens) {
  CheckShapes(input, cu_seqlens);
  const std::vector<int64_t> state_sizes = StateSizes(input);
  const at::TensorOptions wide = WideOptions(input.value_TNV);
  GatedDeltaRuleGradients gradients = EmptyGradients(input);
  for (int64_t document = static_cast<int64_t>(cu_seqlens.size()) - 2; document >= 0; --document) {
    const size_t index = static_cast<size_t>(document);
    const std::vector<Span> spans = CutIntoChunks(cu_seqlens[index], cu_seqlens[index + 1]);
    std::vector<at::Tensor> states = {CarriedBy(input.state_DNKV, document, state_sizes, wide)};
    for (size_t i = 0; i + 1 < spans.size(); ++i) {
      const Chunk chunk(input, spans[i]);
      states.push_back(NextState(chunk, Meeting(chunk, states[i]), states[i]));
    }
    at::Tensor dstate = CarriedBy(dstate_DNKV, document, state_sizes, wide);
    for (size_t i = spans.size(); i-- > 0;) {
      dstate = ChunkBackward(input, spans[i], doutput_TNV, states[i], dstate, &gradients);
    }
    if (gradients.state_DNKV.defined()) gradients.state_DNKV.select(0, document).copy_(dstate);
  }
  return gradients;
}

}  // namespace oom
