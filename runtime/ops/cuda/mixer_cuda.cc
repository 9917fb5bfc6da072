// Formulas and shapes as in runtime/ops/attention.cc.

#include "runtime/ops/cuda/mixer_cuda.h"

#include "runtime/kernels/rotary.h"
#include "runtime/ops/cuda/attention_cuda.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/head_slice.h"

namespace oom {
namespace {

// Norm by head, if the model has it, and rotation: one pass over q or k.
class HeadRotation {
 public:
  HeadRotation(const ModelDescription& model, const AttentionDescription& attention,
               const PackedBatch& batch, const at::Tensor& like)
      : epsilon_(static_cast<float>(model.norm.epsilon)), normed_(attention.query_key_norm) {
    const RotaryRule& rule = attention.rotary;
    const int64_t tokens = batch.positions.size(0);
    cosine_ = at::empty({tokens, attention.head_size / 2}, like.options());
    sine_ = at::empty_like(cosine_);
    RotaryTableArguments<__nv_bfloat16> table{.tokens = tokens,
                                              .head_size = attention.head_size,
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

  at::Tensor Forward(const at::Tensor& x_TNd, const at::Tensor& norm_d) const {
    at::Tensor y_TNd = at::empty_like(x_TNd);
    const int64_t stride = x_TNd.size(1) * x_TNd.size(2);
    NormRotaryForward(
        Shape(x_TNd),
        NormRotaryForwardArguments<__nv_bfloat16>{.x_TNd = DeviceData<__nv_bfloat16>(x_TNd),
                                                  .x_token_stride = stride,
                                                  .norm_d = Norm(norm_d),
                                                  .epsilon = epsilon_,
                                                  .cosine = DeviceData<__nv_bfloat16>(cosine_),
                                                  .sine = DeviceData<__nv_bfloat16>(sine_),
                                                  .y_TNd = DeviceData<__nv_bfloat16>(y_TNd),
                                                  .y_token_stride = stride},
        OperatorStream());
    return y_TNd;
  }

  // In place. `dnorm_d` accumulates; undefined: not wanted.
  void Backward(const at::Tensor& dy_TNd, const at::Tensor& x_TNd, const at::Tensor& norm_d,
                const at::Tensor& dnorm_d) const {
    const RotaryShape shape = Shape(x_TNd);
    const bool wants_norm = normed_ && dnorm_d.defined();
    at::Tensor scratch;
    if (wants_norm) scratch = ScratchBytes(NormRotaryBackwardScratchBytes(shape), x_TNd);
    const int64_t stride = x_TNd.size(1) * x_TNd.size(2);
    NormRotaryBackward(
        shape,
        NormRotaryBackwardArguments<__nv_bfloat16>{
            .dy_TNd = DeviceData<__nv_bfloat16>(dy_TNd),
            .dy_token_stride = stride,
            .x_TNd = DeviceData<__nv_bfloat16>(x_TNd),
            .x_token_stride = stride,
            .norm_d = Norm(norm_d),
            .epsilon = epsilon_,
            .cosine = DeviceData<__nv_bfloat16>(cosine_),
            .sine = DeviceData<__nv_bfloat16>(sine_),
            .dx_TNd = DeviceData<__nv_bfloat16>(dy_TNd),
            .dx_token_stride = stride,
            .dnorm_d = wants_norm ? DeviceData<float>(dnorm_d) : nullptr,
            .scratch = wants_norm ? static_cast<float*>(scratch.data_ptr()) : nullptr},
        OperatorStream());
  }

 private:
  static RotaryShape Shape(const at::Tensor& x_TNd) {
    return {.tokens = x_TNd.size(0), .heads = x_TNd.size(1), .head_size = x_TNd.size(2)};
  }
  const __nv_bfloat16* Norm(const at::Tensor& norm_d) const {
    return normed_ ? DeviceData<__nv_bfloat16>(norm_d) : nullptr;
  }

  const float epsilon_;
  const bool normed_;
  at::Tensor cosine_;
  at::Tensor sine_;
};

}  // namespace

at::Tensor CudaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                            const LayerTensors& weights, const at::Tensor& x_TH,
                            const PackedBatch& batch, MixerSaved* saved, HeadRange heads) {
  const HeadSlice slice(layer.attention, heads);
  const int64_t tokens = x_TH.size(0);
  at::Tensor normed_TH = NormForward(x_TH, weights.input_norm, model.norm);
  const at::Tensor query = at::linear(normed_TH, slice.Query(weights.query))
                               .view({tokens, slice.query_heads, slice.head_size});
  const at::Tensor key = at::linear(normed_TH, slice.KeyValue(weights.key))
                             .view({tokens, slice.kv_heads, slice.head_size});
  const at::Tensor value = at::linear(normed_TH, slice.KeyValue(weights.value))
                               .view({tokens, slice.kv_heads, slice.head_size});
  normed_TH.reset();

  const HeadRotation rotation(model, layer.attention, batch, x_TH);
  AttentionOutput attention = CudaAttentionForward(rotation.Forward(query, weights.query_norm),
                                                   rotation.Forward(key, weights.key_norm), value,
                                                   batch, RuleOf(layer.attention));
  const at::Tensor attended = attention.output_TNd.view({tokens, slice.query_width()});
  if (saved != nullptr) {
    *saved = {.heads = heads,
              .input_TH = x_TH,
              .query_TNr = query,
              .key_TGd = key,
              .value_TGd = value,
              .attention = std::move(attention)};
  }
  if (slice.whole) return at::addmm(x_TH, attended, weights.output.t());
  return at::mm(attended, slice.Output(weights.output).t(), at::kFloat);
}

at::Tensor CudaMixerBackward(const ModelDescription& model, const LayerDescription& layer,
                             const LayerTensors& weights, const at::Tensor& dh_TH,
                             const MixerSaved& saved, const PackedBatch& batch,
                             LayerTensors* gradients) {
  const HeadSlice slice(layer.attention, saved.heads);
  const int64_t tokens = dh_TH.size(0);
  AddWeightGradient(slice.Output(gradients->output), dh_TH,
                    saved.attention.output_TNd.view({tokens, slice.query_width()}));

  const HeadRotation rotation(model, layer.attention, batch, dh_TH);
  const AttentionGradients attention =
      CudaAttentionBackward(at::mm(dh_TH, slice.Output(weights.output))
                                .view({tokens, slice.query_heads, slice.head_size}),
                            rotation.Forward(saved.query_TNr, weights.query_norm),
                            rotation.Forward(saved.key_TGd, weights.key_norm), saved.value_TGd,
                            saved.attention, batch, RuleOf(layer.attention));
  rotation.Backward(attention.query_TNd, saved.query_TNr, weights.query_norm,
                    gradients->query_norm);
  rotation.Backward(attention.key_TGd, saved.key_TGd, weights.key_norm, gradients->key_norm);
  const at::Tensor dquery = attention.query_TNd.view({tokens, slice.query_width()});
  const at::Tensor dkey = attention.key_TGd.view({tokens, slice.kv_width()});
  const at::Tensor dvalue = attention.value_TGd.view({tokens, slice.kv_width()});

  at::Tensor normed_TH = NormForward(saved.input_TH, weights.input_norm, model.norm);
  AddWeightGradient(slice.Query(gradients->query), dquery, normed_TH);
  AddWeightGradient(slice.KeyValue(gradients->key), dkey, normed_TH);
  AddWeightGradient(slice.KeyValue(gradients->value), dvalue, normed_TH);
  normed_TH.reset();

  const at::Tensor dnormed_TH = at::mm(dquery, slice.Query(weights.query), at::kFloat);
  AddWideProduct(dnormed_TH, dkey, slice.KeyValue(weights.key));
  AddWideProduct(dnormed_TH, dvalue, slice.KeyValue(weights.value));
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
