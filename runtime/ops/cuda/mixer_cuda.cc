// Formulas and shapes as in runtime/ops/attention.cc.

#include "runtime/ops/cuda/mixer_cuda.h"

#include "runtime/kernels/output_gate.h"
#include "runtime/kernels/rotary.h"
#include "runtime/ops/cuda/attention_cuda.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/head_slice.h"

namespace oom {
namespace {

// [T, N, r] whose rows are a head's, or begin with it.
struct HeadRows {
  explicit HeadRows(const at::Tensor& rows_TNr)
      : data(DeviceData<__nv_bfloat16>(rows_TNr)),
        head_stride(rows_TNr.size(2)),
        token_stride(rows_TNr.size(1) * head_stride) {}

  __nv_bfloat16* data;
  int64_t head_stride;
  int64_t token_stride;
};

// Norm by head, if the model has it, and rotation: one pass over q or k.
class HeadRotation {
 public:
  HeadRotation(const ModelDescription& model, const AttentionDescription& attention,
               const PackedBatch& batch, const at::Tensor& like)
      : norm_(model.norm),
        normed_(attention.query_key_norm),
        head_size_(attention.head_size),
        rotary_size_(attention.rotary.size) {
    const RotaryRule& rule = attention.rotary;
    const int64_t tokens = batch.positions.size(0);
    cosine_ = at::empty({tokens, rule.size / 2}, like.options());
    sine_ = at::empty_like(cosine_);
    RotaryTableArguments<__nv_bfloat16> table{.tokens = tokens,
                                              .rotary_size = rule.size,
                                              .pair_count = rule.pair_count,
                                              .theta = rule.theta,
                                              .cosine = DeviceData<__nv_bfloat16>(cosine_),
                                              .sine = DeviceData<__nv_bfloat16>(sine_)};
    if (rule.yarn) {
      const YarnRamp ramp = YarnRampOf(*rule.yarn, rule.size, rule.theta);
      table.factor = static_cast<float>(rule.yarn->factor);
      table.ramp_low = static_cast<float>(ramp.low);
      table.ramp_width = static_cast<float>(ramp.high - ramp.low);
      table.attention_factor = static_cast<float>(rule.yarn->attention_factor);
    }
    FillRotaryTable(table, DeviceData<int64_t>(batch.positions), OperatorStream());
  }

  // [T, N, d], of the rows' heads.
  at::Tensor Forward(const at::Tensor& x_TNr, const at::Tensor& norm_d) const {
    const at::Tensor y_TNd = at::empty({x_TNr.size(0), x_TNr.size(1), head_size_}, x_TNr.options());
    const HeadRows x(x_TNr), y(y_TNd);
    NormRotaryForward(
        Shape(x_TNr),
        NormRotaryForwardArguments<__nv_bfloat16>{.x_TNd = x.data,
                                                  .x_token_stride = x.token_stride,
                                                  .x_head_stride = x.head_stride,
                                                  .norm_d = Norm(norm_d),
                                                  .scale = norm_.scale,
                                                  .epsilon = static_cast<float>(norm_.epsilon),
                                                  .cosine = DeviceData<__nv_bfloat16>(cosine_),
                                                  .sine = DeviceData<__nv_bfloat16>(sine_),
                                                  .y_TNd = y.data,
                                                  .y_token_stride = y.token_stride,
                                                  .y_head_stride = y.head_stride},
        OperatorStream());
    return y_TNd;
  }

  // Into the heads of `dx_TNr`, which may be dy. `dnorm_d` accumulates; undefined: not wanted.
  void Backward(const at::Tensor& dy_TNd, const at::Tensor& x_TNr, const at::Tensor& norm_d,
                const at::Tensor& dnorm_d, const at::Tensor& dx_TNr) const {
    const RotaryShape shape = Shape(x_TNr);
    const bool wants_norm = normed_ && dnorm_d.defined();
    at::Tensor scratch;
    if (wants_norm) scratch = ScratchBytes(NormRotaryBackwardScratchBytes(shape), x_TNr);
    const HeadRows dy(dy_TNd), x(x_TNr), dx(dx_TNr);
    NormRotaryBackward(
        shape,
        NormRotaryBackwardArguments<__nv_bfloat16>{
            .dy_TNd = dy.data,
            .dy_token_stride = dy.token_stride,
            .dy_head_stride = dy.head_stride,
            .x_TNd = x.data,
            .x_token_stride = x.token_stride,
            .x_head_stride = x.head_stride,
            .norm_d = Norm(norm_d),
            .scale = norm_.scale,
            .epsilon = static_cast<float>(norm_.epsilon),
            .cosine = DeviceData<__nv_bfloat16>(cosine_),
            .sine = DeviceData<__nv_bfloat16>(sine_),
            .dx_TNd = dx.data,
            .dx_token_stride = dx.token_stride,
            .dx_head_stride = dx.head_stride,
            .dnorm_d = wants_norm ? DeviceData<float>(dnorm_d) : nullptr,
            .scratch = wants_norm ? static_cast<float*>(scratch.data_ptr()) : nullptr},
        OperatorStream());
  }

 private:
  RotaryShape Shape(const at::Tensor& x_TNr) const {
    return {.tokens = x_TNr.size(0),
            .heads = x_TNr.size(1),
            .head_size = head_size_,
            .rotary_size = rotary_size_};
  }
  const __nv_bfloat16* Norm(const at::Tensor& norm_d) const {
    return normed_ ? DeviceData<__nv_bfloat16>(norm_d) : nullptr;
  }

  const NormRule norm_;
  const bool normed_;
  const int64_t head_size_;
  const int64_t rotary_size_;
  at::Tensor cosine_;
  at::Tensor sine_;
};

OutputGateShape GateShape(const HeadSlice& slice, int64_t tokens) {
  return {
      .rows = tokens * slice.query_heads, .width = slice.head_size, .gate_stride = slice.head_rows};
}

// Behind the head in rows of [query | gate].
__nv_bfloat16* GateOf(const at::Tensor& rows_TNr, const HeadSlice& slice) {
  return DeviceData<__nv_bfloat16>(rows_TNr) + slice.head_size;
}

// Attention's result behind the gate, if there is one: what the output projection takes.
at::Tensor Gated(const HeadSlice& slice, const at::Tensor& output_TNd,
                 const at::Tensor& query_TNr) {
  if (!slice.gated()) return output_TNd;
  const at::Tensor a_TNd = at::empty_like(output_TNd);
  OutputGateForward(GateShape(slice, output_TNd.size(0)), DeviceData<__nv_bfloat16>(output_TNd),
                    GateOf(query_TNr, slice), DeviceData<__nv_bfloat16>(a_TNd), OperatorStream());
  return a_TNd;
}

// Turns the gradient of the gated result, in place, into that of attention's; writes the gate's
// into the rows of `dquery_TNr` and returns the gated result.
at::Tensor GateBackward(const HeadSlice& slice, const MixerSaved& saved,
                        const at::Tensor& dattended_TNd, const at::Tensor& dquery_TNr) {
  const at::Tensor a_TNd = at::empty_like(dattended_TNd);
  OutputGateBackward(GateShape(slice, dattended_TNd.size(0)),
                     {.da_Rd = DeviceData<__nv_bfloat16>(dattended_TNd),
                      .o_Rd = DeviceData<__nv_bfloat16>(saved.attention.output_TNd),
                      .gate_Rd = GateOf(saved.query_TNr, slice),
                      .a_Rd = DeviceData<__nv_bfloat16>(a_TNd),
                      .do_Rd = DeviceData<__nv_bfloat16>(dattended_TNd),
                      .dgate_Rd = GateOf(dquery_TNr, slice)},
                     OperatorStream());
  return a_TNd;
}

// As rows of a head each.
at::Tensor ByHead(const at::Tensor& x_TGd) { return x_TGd.view({-1, x_TGd.size(2)}); }

// What attention takes as values.
at::Tensor NormedValue(const ModelDescription& model, const AttentionDescription& attention,
                       const at::Tensor& value_TGd) {
  if (!attention.value_norm) return value_TGd;
  return NormForward(ByHead(value_TGd), {}, model.norm).view_as(value_TGd);
}

}  // namespace

at::Tensor CudaFinishMixer(const ModelDescription& model, const LayerTensors& weights,
                           const at::Tensor& x_TH, const at::Tensor& sum_TH,
                           at::Tensor* output_TH) {
  const at::Tensor output = sum_TH.to(x_TH.scalar_type());
  if (output_TH != nullptr) *output_TH = output;
  return NormForward(output, weights.mixer_output_norm, model.norm, {.addend_RH = x_TH});
}

at::Tensor CudaBeginMixerBackward(const ModelDescription& model, const LayerTensors& weights,
                                  const at::Tensor& dh_TH, const at::Tensor& output_TH,
                                  LayerTensors* gradients) {
  at::Tensor dsum_TH = at::empty_like(dh_TH);
  NormBackward({.dy_RH = dh_TH,
                .x_RH = output_TH,
                .weight_H = weights.mixer_output_norm,
                .rule = model.norm,
                .dweight_H = gradients->mixer_output_norm},
               dsum_TH);
  return dsum_TH;
}

at::Tensor CudaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                            const LayerTensors& weights, const at::Tensor& x_TH,
                            const PackedBatch& batch, MixerSaved* saved, HeadRange heads) {
  const AttentionDescription& shape = layer.attention;
  const HeadSlice slice(shape, heads);
  const int64_t tokens = x_TH.size(0);
  at::Tensor normed_TH = NormForward(x_TH, weights.input_norm, model.norm);
  const at::Tensor query = at::linear(normed_TH, slice.Query(weights.query))
                               .view({tokens, slice.query_heads, slice.head_rows});
  const at::Tensor key = at::linear(normed_TH, slice.KeyValue(weights.key))
                             .view({tokens, slice.kv_heads, slice.head_size});
  const at::Tensor value = shape.key_is_value
                               ? key
                               : at::linear(normed_TH, slice.KeyValue(weights.value))
                                     .view({tokens, slice.kv_heads, slice.head_size});
  normed_TH.reset();

  const HeadRotation rotation(model, shape, batch, x_TH);
  AttentionOutput attention = CudaAttentionForward(
      rotation.Forward(query, weights.query_norm), rotation.Forward(key, weights.key_norm),
      NormedValue(model, shape, value), batch, RuleOf(shape));
  const at::Tensor attended =
      Gated(slice, attention.output_TNd, query).view({tokens, slice.query_width()});
  if (saved != nullptr) {
    *saved = {.heads = heads,
              .input_TH = x_TH,
              .query_TNr = query,
              .key_TGd = key,
              .value_TGd = value,
              .attention = std::move(attention)};
  }
  if (!slice.whole) return at::mm(attended, slice.Output(weights.output).t(), at::kFloat);
  if (!model.branch_norms) return at::addmm(x_TH, attended, weights.output.t());
  return CudaFinishMixer(model, weights, x_TH, at::mm(attended, weights.output.t()),
                         saved == nullptr ? nullptr : &saved->output_TH);
}

at::Tensor CudaMixerBackward(const ModelDescription& model, const LayerDescription& layer,
                             const LayerTensors& weights, const at::Tensor& dh_TH,
                             const MixerSaved& saved, const PackedBatch& batch,
                             LayerTensors* gradients) {
  const AttentionDescription& shape = layer.attention;
  const HeadSlice slice(shape, saved.heads);
  const int64_t tokens = dh_TH.size(0);
  at::Tensor dsum_TH = dh_TH;
  if (slice.whole && model.branch_norms) {
    dsum_TH = CudaBeginMixerBackward(model, weights, dh_TH, saved.output_TH, gradients);
  }
  const at::Tensor dattended_TNd = at::mm(dsum_TH, slice.Output(weights.output))
                                       .view({tokens, slice.query_heads, slice.head_size});
  at::Tensor dquery_TNr;
  at::Tensor attended_TNd = saved.attention.output_TNd;
  if (slice.gated()) {
    dquery_TNr = at::empty_like(saved.query_TNr);
    attended_TNd = GateBackward(slice, saved, dattended_TNd, dquery_TNr);
  }
  AddWeightGradient(slice.Output(gradients->output), dsum_TH,
                    attended_TNd.view({tokens, slice.query_width()}));
  attended_TNd.reset();
  dsum_TH.reset();

  const HeadRotation rotation(model, shape, batch, dh_TH);
  const AttentionGradients attention = CudaAttentionBackward(
      dattended_TNd, rotation.Forward(saved.query_TNr, weights.query_norm),
      rotation.Forward(saved.key_TGd, weights.key_norm), NormedValue(model, shape, saved.value_TGd),
      saved.attention, batch, RuleOf(shape));
  if (!slice.gated()) dquery_TNr = attention.query_TNd;
  rotation.Backward(attention.query_TNd, saved.query_TNr, weights.query_norm, gradients->query_norm,
                    dquery_TNr);
  rotation.Backward(attention.key_TGd, saved.key_TGd, weights.key_norm, gradients->key_norm,
                    attention.key_TGd);
  if (shape.value_norm) {
    NormBackward(
        {.dy_RH = ByHead(attention.value_TGd), .x_RH = ByHead(saved.value_TGd), .rule = model.norm},
        ByHead(attention.value_TGd));
  }
  const at::Tensor dquery = dquery_TNr.view({tokens, slice.query_heads * slice.head_rows});
  at::Tensor dkey = attention.key_TGd.view({tokens, slice.kv_width()});
  const at::Tensor dvalue = attention.value_TGd.view({tokens, slice.kv_width()});
  if (shape.key_is_value) dkey.add_(dvalue);

  at::Tensor normed_TH = NormForward(saved.input_TH, weights.input_norm, model.norm);
  AddWeightGradient(slice.Query(gradients->query), dquery, normed_TH);
  AddWeightGradient(slice.KeyValue(gradients->key), dkey, normed_TH);
  if (!shape.key_is_value) {
    AddWeightGradient(slice.KeyValue(gradients->value), dvalue, normed_TH);
  }
  normed_TH.reset();

  const at::Tensor dnormed_TH = at::mm(dquery, slice.Query(weights.query), at::kFloat);
  AddWideProduct(dnormed_TH, dkey, slice.KeyValue(weights.key));
  if (!shape.key_is_value) AddWideProduct(dnormed_TH, dvalue, slice.KeyValue(weights.value));
  // A part's result is wide, and may lie where its argument was.
  at::Tensor dx_TH = slice.whole ? at::empty_like(dh_TH) : dnormed_TH;
  NormBackward({.dy_RH = dnormed_TH,
                .x_RH = saved.input_TH,
                .weight_H = weights.input_norm,
                .rule = model.norm,
                .residual_gradient_RH = slice.whole ? dh_TH : at::Tensor(),
                .dweight_H = gradients->input_norm},
               dx_TH);
  return dx_TH;
}

}  // namespace oom
