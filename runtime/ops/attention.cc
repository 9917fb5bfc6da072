// The mixer: h = x + Attention(RMSNorm(x)).
// Forward:
//   n = norm(x);  q, k, v = n Wq.T, n Wk.T, n Wv.T (v = k where the model has no Wv);
//   q, k normed by head (if the model has it), then rotated;  v normed by head likewise;
//   o = causal attention per document;  a = o, or o * logistic(gate) where Wq gives a gate too;
//   h = x + s, s = a Wo.T; with branch norms h = x + norm(s).
// Backward, in reverse:
//   ds = dh, or the norm's backward of it;
//   da = ds Wo, dWo += ds.T a;  do = da * logistic(gate), dgate = da * o * logistic'(gate);
//   dq, dk, dv;  norms and rotation back;
//   dn = dq Wq + dk Wk + dv Wv, dWq += dq.T n, ...;
//   dx = dh + norm backward of dn.
// Every step after the projections but the branch norm is linear in the sum over head groups, the
// input norm's backward included, so parts add up; the branch norm is of their sum. Shapes as in
// layer.h, N and G counting the heads of the part.

#include "runtime/ops/device_operators.h"
#include "runtime/ops/head_slice.h"
#include "runtime/ops/layer.h"
#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"
#include "runtime/ops/rotary.h"

namespace oom {
namespace {

at::Tensor NormAndRotate(const NormRule* norm, const at::Tensor& x_TNd, const at::Tensor& weight_d,
                         const RotaryTable& table) {
  if (norm == nullptr) return RotaryForward(x_TNd, table);
  return RotaryForward(RmsNormForward(x_TNd, weight_d, *norm), table);
}

at::Tensor NormAndRotateBackward(const NormRule* norm, const at::Tensor& dy_TNd,
                                 const at::Tensor& x_TNd, const at::Tensor& weight_d,
                                 const RotaryTable& table, const at::Tensor& dweight_d) {
  const at::Tensor drotated = RotaryBackward(dy_TNd, table);
  if (norm == nullptr) return drotated;
  return RmsNormBackward(drotated, x_TNd, weight_d, *norm, dweight_d).to(dy_TNd.scalar_type());
}

// The query projection's result as its two parts, or the query alone.
struct QueryAndGate {
  QueryAndGate(const at::Tensor& rows_TNr, const HeadSlice& slice)
      : query_TNd(rows_TNr.narrow(2, 0, slice.head_size)) {
    if (slice.gated()) {
      gate_TNd = rows_TNr.narrow(2, slice.head_size, slice.head_size);
    }
  }
  // a, of an attention's result.
  at::Tensor Gated(const at::Tensor& o_TNd) const {
    return gate_TNd.defined() ? at::mul(o_TNd, at::sigmoid(gate_TNd)) : o_TNd;
  }

  at::Tensor query_TNd;
  at::Tensor gate_TNd;
};

}  // namespace

at::Tensor MixerForward(const ModelDescription& model, const LayerDescription& layer,
                        const LayerTensors& weights, const at::Tensor& x_TH,
                        const PackedBatch& batch, MixerSaved* saved, HeadRange heads) {
  if (const DeviceOperators* device = MixerOperatorsFor(x_TH, layer)) {
    return device->mixer_forward(model, layer, weights, x_TH, batch, saved, heads);
  }
  const AttentionDescription& shape = layer.attention;
  const HeadSlice slice(shape, heads);
  const NormRule* const head_norm = shape.query_key_norm ? &model.norm : nullptr;
  const int64_t tokens = x_TH.size(0);
  const at::Tensor normed_TH = RmsNormForward(x_TH, weights.input_norm, model.norm);
  const at::Tensor query_rows = at::linear(normed_TH, slice.Query(weights.query))
                                    .view({tokens, slice.query_heads, slice.head_rows});
  const at::Tensor key = at::linear(normed_TH, slice.KeyValue(weights.key))
                             .view({tokens, slice.kv_heads, slice.head_size});
  const at::Tensor value = shape.key_is_value
                               ? key
                               : at::linear(normed_TH, slice.KeyValue(weights.value))
                                     .view({tokens, slice.kv_heads, slice.head_size});
  const QueryAndGate query(query_rows, slice);
  const RotaryTable table = MakeRotaryTable(batch.positions, shape.rotary, x_TH.scalar_type());
  AttentionOutput attention =
      CausalAttentionForward(NormAndRotate(head_norm, query.query_TNd, weights.query_norm, table),
                             NormAndRotate(head_norm, key, weights.key_norm, table),
                             shape.value_norm ? RmsNormForward(value, {}, model.norm) : value,
                             batch.cu_seqlens, RuleOf(shape));
  const at::Tensor attended =
      query.Gated(attention.output_TNd).reshape({tokens, slice.query_width()});
  if (saved != nullptr) {
    *saved = {.heads = heads,
              .input_TH = x_TH,
              .query_TNr = query_rows,
              .key_TGd = key,
              .value_TGd = value,
              .attention = std::move(attention)};
  }
  if (slice.whole) {
    return FinishMixer(model, weights, x_TH, at::linear(attended, weights.output),
                       saved == nullptr ? nullptr : &saved->output_TH);
  }
  return at::linear(Wide(attended), Wide(slice.Output(weights.output)));
}

at::Tensor MixerBackward(const ModelDescription& model, const LayerDescription& layer,
                         const LayerTensors& weights, const at::Tensor& dh_TH,
                         const MixerSaved& saved, const PackedBatch& batch,
                         LayerTensors* gradients) {
  if (const DeviceOperators* device = MixerOperatorsFor(dh_TH, layer)) {
    return device->mixer_backward(model, layer, weights, dh_TH, saved, batch, gradients);
  }
  const AttentionDescription& shape = layer.attention;
  const HeadSlice slice(shape, saved.heads);
  const NormRule* const head_norm = shape.query_key_norm ? &model.norm : nullptr;
  const int64_t tokens = dh_TH.size(0);
  const at::Tensor normed_TH = RmsNormForward(saved.input_TH, weights.input_norm, model.norm);
  const RotaryTable table = MakeRotaryTable(batch.positions, shape.rotary, dh_TH.scalar_type());
  const QueryAndGate query(saved.query_TNr, slice);
  const at::Tensor& output_TNd = saved.attention.output_TNd;

  const at::Tensor dsum_TH =
      slice.whole ? BeginMixerBackward(model, weights, dh_TH, saved.output_TH, gradients) : dh_TH;
  at::Tensor dattended = at::mm(dsum_TH, slice.Output(weights.output))
                             .view({tokens, slice.query_heads, slice.head_size});
  AccumulateWeightGradient(slice.Output(gradients->output), dsum_TH,
                           query.Gated(output_TNd).reshape({tokens, slice.query_width()}));
  at::Tensor dquery_rows = at::empty_like(saved.query_TNr);
  if (query.gate_TNd.defined()) {
    const at::Tensor logistic = at::sigmoid(query.gate_TNd);
    at::Tensor dgate = dquery_rows.narrow(2, slice.head_size, slice.head_size);
    at::sigmoid_backward_out(dgate, at::mul(dattended, output_TNd), logistic);
    dattended = at::mul(dattended, logistic);
  }
  const AttentionGradients attention = CausalAttentionBackward(
      dattended, NormAndRotate(head_norm, query.query_TNd, weights.query_norm, table),
      NormAndRotate(head_norm, saved.key_TGd, weights.key_norm, table),
      shape.value_norm ? RmsNormForward(saved.value_TGd, {}, model.norm) : saved.value_TGd,
      saved.attention, batch.cu_seqlens, RuleOf(shape));
  dquery_rows.narrow(2, 0, slice.head_size)
      .copy_(NormAndRotateBackward(head_norm, attention.query_TNd, query.query_TNd,
                                   weights.query_norm, table, gradients->query_norm));
  const at::Tensor dquery = dquery_rows.view({tokens, slice.query_heads * slice.head_rows});
  at::Tensor dkey = NormAndRotateBackward(head_norm, attention.key_TGd, saved.key_TGd,
                                          weights.key_norm, table, gradients->key_norm)
                        .view({tokens, slice.kv_width()});
  const at::Tensor dvalue =
      (shape.value_norm ? RmsNormBackward(attention.value_TGd, saved.value_TGd, {}, model.norm, {})
                              .to(dh_TH.scalar_type())
                        : attention.value_TGd)
          .view({tokens, slice.kv_width()});
  if (shape.key_is_value) dkey = dkey.add(dvalue);

  AccumulateWeightGradient(slice.Query(gradients->query), dquery, normed_TH);
  AccumulateWeightGradient(slice.KeyValue(gradients->key), dkey, normed_TH);
  at::Tensor dnormed_TH = Wide(at::mm(dquery, slice.Query(weights.query)));
  AddProduct(dnormed_TH, dkey, slice.KeyValue(weights.key));
  if (!shape.key_is_value) {
    AccumulateWeightGradient(slice.KeyValue(gradients->value), dvalue, normed_TH);
    AddProduct(dnormed_TH, dvalue, slice.KeyValue(weights.value));
  }
  at::Tensor dx_TH = RmsNormBackward(dnormed_TH, saved.input_TH, weights.input_norm, model.norm,
                                     gradients->input_norm);
  return slice.whole ? AddResidual(dh_TH, dx_TH) : dx_TH;
}

}  // namespace oom
