// The mixer: h = x + Attention(RMSNorm(x)).
// Forward:
//   n = norm(x);  q, k, v = n Wq.T, n Wk.T, n Wv.T;
//   q, k normed by head (if the model has it), then rotated;
//   o = causal attention per document;  h = x + o Wo.T.
// Backward, in reverse:
//   do = dh Wo, dWo += dh.T o;  dq, dk, dv;  rotation and norms back;
//   dn = dq Wq + dk Wk + dv Wv, dWq += dq.T n, ...;
//   dx = dh + norm backward of dn.
// Every step after the projections is linear in the sum over head groups, the norm's backward
// included, so parts add up. Shapes as in layer.h, N and G counting the heads of the part.

#include "runtime/ops/device_operators.h"
#include "runtime/ops/head_slice.h"
#include "runtime/ops/layer.h"
#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"
#include "runtime/ops/rotary.h"

namespace oom {
namespace {

at::Tensor NormAndRotate(const ModelDescription& model, const at::Tensor& x_TNd,
                         const at::Tensor& norm, const RotaryTable& table) {
  if (!model.query_key_norm) return RotaryForward(x_TNd, table);
  return RotaryForward(RmsNormForward(x_TNd, norm, model.rms_epsilon), table);
}

at::Tensor NormAndRotateBackward(const ModelDescription& model, const at::Tensor& dy_TNd,
                                 const at::Tensor& x_TNd, const at::Tensor& norm,
                                 const RotaryTable& table, const at::Tensor& dnorm) {
  const at::Tensor drotated = RotaryBackward(dy_TNd, table);
  if (!model.query_key_norm) return drotated;
  return RmsNormBackward(drotated, x_TNd, norm, model.rms_epsilon, dnorm).to(dy_TNd.scalar_type());
}

}  // namespace

at::Tensor MixerForward(const ModelDescription& model, const LayerTensors& weights,
                        const at::Tensor& x_TH, const PackedBatch& batch, MixerSaved* saved,
                        HeadRange heads) {
  if (const DeviceOperators* device = OperatorsFor(x_TH)) {
    return device->mixer_forward(model, weights, x_TH, batch, saved, heads);
  }
  const HeadSlice slice(model, heads);
  const int64_t tokens = x_TH.size(0);
  const at::Tensor normed_TH = RmsNormForward(x_TH, weights.input_norm, model.rms_epsilon);
  const at::Tensor query = at::linear(normed_TH, slice.Query(weights.query))
                               .view({tokens, slice.query_heads, model.head_size});
  const at::Tensor key = at::linear(normed_TH, slice.KeyValue(weights.key))
                             .view({tokens, slice.kv_heads, model.head_size});
  const at::Tensor value = at::linear(normed_TH, slice.KeyValue(weights.value))
                               .view({tokens, slice.kv_heads, model.head_size});

  const RotaryTable table = MakeRotaryTable(model, batch.positions, x_TH.scalar_type());
  AttentionOutput attention =
      CausalAttentionForward(NormAndRotate(model, query, weights.query_norm, table),
                             NormAndRotate(model, key, weights.key_norm, table), value,
                             batch.cu_seqlens, model.sliding_window);
  const at::Tensor attended = attention.output_TNd.view({tokens, slice.query_rows});
  if (saved != nullptr) {
    *saved = {.heads = heads,
              .input_TH = x_TH,
              .query_TNd = query,
              .key_TGd = key,
              .value_TGd = value,
              .attention = std::move(attention)};
  }
  if (slice.whole) return at::linear(attended, weights.output).add_(x_TH);
  return at::linear(Wide(attended), Wide(slice.Output(weights.output)));
}

at::Tensor MixerBackward(const ModelDescription& model, const LayerTensors& weights,
                         const at::Tensor& dh_TH, const MixerSaved& saved, const PackedBatch& batch,
                         LayerTensors* gradients) {
  if (const DeviceOperators* device = OperatorsFor(dh_TH)) {
    return device->mixer_backward(model, weights, dh_TH, saved, batch, gradients);
  }
  const HeadSlice slice(model, saved.heads);
  const int64_t tokens = dh_TH.size(0);
  const at::Tensor normed_TH =
      RmsNormForward(saved.input_TH, weights.input_norm, model.rms_epsilon);
  const RotaryTable table = MakeRotaryTable(model, batch.positions, dh_TH.scalar_type());

  const at::Tensor dattended = at::mm(dh_TH, slice.Output(weights.output));
  AccumulateWeightGradient(slice.Output(gradients->output), dh_TH,
                           saved.attention.output_TNd.view({tokens, slice.query_rows}));
  const AttentionGradients attention = CausalAttentionBackward(
      dattended.view({tokens, slice.query_heads, model.head_size}),
      NormAndRotate(model, saved.query_TNd, weights.query_norm, table),
      NormAndRotate(model, saved.key_TGd, weights.key_norm, table), saved.value_TGd,
      saved.attention, batch.cu_seqlens, model.sliding_window);
  const at::Tensor dquery = NormAndRotateBackward(model, attention.query_TNd, saved.query_TNd,
                                                  weights.query_norm, table, gradients->query_norm)
                                .view({tokens, slice.query_rows});
  const at::Tensor dkey = NormAndRotateBackward(model, attention.key_TGd, saved.key_TGd,
                                                weights.key_norm, table, gradients->key_norm)
                              .view({tokens, slice.kv_rows});
  const at::Tensor dvalue = attention.value_TGd.view({tokens, slice.kv_rows});

  AccumulateWeightGradient(slice.Query(gradients->query), dquery, normed_TH);
  AccumulateWeightGradient(slice.KeyValue(gradients->key), dkey, normed_TH);
  AccumulateWeightGradient(slice.KeyValue(gradients->value), dvalue, normed_TH);
  at::Tensor dnormed_TH = Wide(at::mm(dquery, slice.Query(weights.query)));
  AddProduct(dnormed_TH, dkey, slice.KeyValue(weights.key));
  AddProduct(dnormed_TH, dvalue, slice.KeyValue(weights.value));
  at::Tensor dx_TH = RmsNormBackward(dnormed_TH, saved.input_TH, weights.input_norm,
                                     model.rms_epsilon, gradients->input_norm);
  return slice.whole ? dx_TH.add_(dh_TH).to(dh_TH.scalar_type()) : dx_TH;
}

}  // namespace oom
