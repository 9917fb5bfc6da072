// Formulas and shapes as in runtime/ops/gated_delta_net.h.

#include "runtime/ops/cuda/gated_delta_net_cuda.h"

#include <utility>

#include "runtime/kernels/causal_convolution.h"
#include "runtime/kernels/delta_chunks.h"
#include "runtime/kernels/delta_gates.h"
#include "runtime/kernels/gated_delta_rule.h"
#include "runtime/kernels/gated_rms_norm.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/gpu_limits.h"
#include "runtime/ops/precision.h"

namespace oom {
namespace {

using Bfloat16 = __nv_bfloat16;

constexpr int64_t kConvolutionTaps = 4;

void CheckShape(const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights) {
  OOM_CHECK_MSG(shape.key_size == kDeltaHeadSize && shape.value_size == kDeltaHeadSize,
                "the kernels of the gated delta rule take heads of 128");
  OOM_CHECK_MSG(weights.convolution.size(2) == kConvolutionTaps,
                "the kernels of the causal convolution take four taps");
}

at::Tensor EmptyWide(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options().dtype(at::kFloat));
}

// What backward makes once more, but for the convolution's outgoing context.
struct RuleOperands {
  at::Tensor query;  // [T, G, K] FP16, as is the next.
  at::Tensor key;
  at::Tensor value;
  at::Tensor beta;
  at::Tensor log_decay;
};

// The kernels' view of one call's tensors.
class DeltaNetCall {
 public:
  DeltaNetCall(const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights,
               const DeltaNetBatch& batch)
      : shape_(shape),
        batch_(batch),
        taps_(weights.convolution),
        a_log_(Wide(weights.a_log)),
        dt_bias_(Wide(weights.dt_bias)),
        norm_(Wide(weights.norm)) {
    CheckShape(shape, weights);
  }

  CausalConvolutionShape Convolution() const {
    return {.tokens = batch_.tokens,
            .documents = batch_.documents,
            .key_width = shape_.key_width(),
            .value_width = shape_.value_width()};
  }

  CausalConvolutionKernelInput ConvolutionInput(const GatedDeltaNetSaved& saved) const {
    return {.x_TC = DeviceData<Bfloat16>(saved.mixed_TC),
            .weight_CJ = DeviceData<Bfloat16>(taps_),
            .context_DPC = DeviceData<Bfloat16>(saved.state.convolution_DPC),
            .cu_seqlens = DeviceData<int64_t>(batch_.cu_seqlens)};
  }

  DeltaGateKernelInput GateInput(const GatedDeltaNetSaved& saved) const {
    return {.tokens = batch_.tokens,
            .value_heads = static_cast<int>(shape_.value_heads),
            .b_TN = DeviceData<Bfloat16>(saved.b_TN),
            .a_TN = DeviceData<Bfloat16>(saved.a_TN),
            .a_log_N = DeviceData<float>(a_log_),
            .dt_bias_N = DeviceData<float>(dt_bias_)};
  }

  // `context_DPC`: where the outgoing context goes; undefined: not wanted.
  RuleOperands Operands(const GatedDeltaNetSaved& saved, const at::Tensor& context_DPC) const {
    const at::TensorOptions options = saved.mixed_TC.options();
    const int64_t tokens = batch_.tokens;
    RuleOperands operands;
    operands.query =
        at::empty({tokens, shape_.key_heads, shape_.key_size}, options.dtype(at::kHalf));
    operands.key = at::empty_like(operands.query);
    operands.value = at::empty({tokens, shape_.value_heads, shape_.value_size}, options);
    operands.beta = EmptyWide({tokens, shape_.value_heads}, saved.mixed_TC);
    operands.log_decay = at::empty_like(operands.beta);
    CausalConvolutionForward(Convolution(), ConvolutionInput(saved),
                             {.query = DeviceData<__half>(operands.query),
                              .key = DeviceData<__half>(operands.key),
                              .value = DeviceData<Bfloat16>(operands.value),
                              .context_DPC = DeviceData<Bfloat16>(context_DPC)},
                             OperatorStream());
    DeltaGatesForward(GateInput(saved), DeviceData<float>(operands.beta),
                      DeviceData<float>(operands.log_decay), OperatorStream());
    return operands;
  }

  GatedDeltaRuleShape Rule() const {
    return {.tokens = batch_.tokens,
            .documents = batch_.documents,
            .chunks = batch_.chunks,
            .key_heads = static_cast<int>(shape_.key_heads),
            .value_heads = static_cast<int>(shape_.value_heads)};
  }

  // Of the rule's backward, as the planner has it.
  int64_t MostScratchBytes() const {
    return GatedDeltaRuleBackwardBytes(batch_.chunks, shape_.value_heads);
  }

  GatedDeltaRuleKernelInput RuleInput(const RuleOperands& operands,
                                      const at::Tensor& state_DNKV) const {
    return {.chunks = reinterpret_cast<const DeltaChunk*>(DeviceData<int64_t>(batch_.chunk_list)),
            .document_chunks = DeviceData<int32_t>(batch_.document_chunks),
            .query_TGK = DeviceData<__half>(operands.query),
            .key_TGK = DeviceData<__half>(operands.key),
            .value_TNV = DeviceData<Bfloat16>(operands.value),
            .log_decay_TN = DeviceData<float>(operands.log_decay),
            .beta_TN = DeviceData<float>(operands.beta),
            .state_DNKV = DeviceData<float>(state_DNKV)};
  }

  GatedRmsNormInput NormInput(const GatedDeltaNetSaved& saved) const {
    return {.rows = batch_.tokens * shape_.value_heads,
            .epsilon = static_cast<float>(shape_.rms_epsilon),
            .x_RV = DeviceData<Bfloat16>(saved.attended_TNV),
            .gate_RV = DeviceData<Bfloat16>(saved.gate_TNV),
            .weight_V = DeviceData<float>(norm_)};
  }

  // [T, N*V]
  at::Tensor Normed(const GatedDeltaNetSaved& saved) const {
    at::Tensor normed = at::empty_like(saved.attended_TNV);
    GatedRmsNormForward(NormInput(saved), DeviceData<Bfloat16>(normed), OperatorStream());
    return normed.view({batch_.tokens, shape_.value_width()});
  }

 private:
  const GatedDeltaNetShape& shape_;
  const DeltaNetBatch& batch_;
  const at::Tensor taps_;
  const at::Tensor a_log_;
  const at::Tensor dt_bias_;
  const at::Tensor norm_;
};

struct NormGradients {
  at::Tensor attended_TNV;  // Wide.
  at::Tensor gate_TM;
};

NormGradients NormBackward(const DeltaNetCall& call, const GatedDeltaNetSaved& saved,
                           const at::Tensor& dnormed_TM, const at::Tensor& dnorm_V) {
  NormGradients result;
  result.attended_TNV = EmptyWide(saved.attended_TNV.sizes(), saved.attended_TNV);
  result.gate_TM = at::empty_like(dnormed_TM);
  const at::Tensor scratch = ScratchBytes(GatedRmsNormBackwardScratchBytes(), dnormed_TM);
  GatedRmsNormBackward(call.NormInput(saved), DeviceData<Bfloat16>(dnormed_TM),
                       {.x_RV = DeviceData<float>(result.attended_TNV),
                        .gate_RV = DeviceData<Bfloat16>(result.gate_TM),
                        .weight_V = DeviceData<float>(dnorm_V)},
                       scratch.data_ptr(), OperatorStream());
  return result;
}

// All wide.
struct RuleGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor log_decay;
  at::Tensor beta;
  at::Tensor state;  // Undefined where the state was.
};

RuleGradients RuleBackward(const DeltaNetCall& call, const GatedDeltaNetSaved& saved,
                           const at::Tensor& dattended_TNV, const at::Tensor& dstate_DNKV) {
  const RuleOperands operands = call.Operands(saved, at::Tensor());
  const auto wide_like = [](const at::Tensor& x) { return EmptyWide(x.sizes(), x); };
  RuleGradients result;
  result.query = wide_like(operands.query);
  result.key = wide_like(operands.key);
  result.value = wide_like(operands.value);
  result.log_decay = at::empty_like(operands.log_decay);
  result.beta = at::empty_like(operands.beta);
  if (saved.state.rule_DNKV.defined()) result.state = at::empty_like(saved.state.rule_DNKV);
  const int64_t scratch_bytes = GatedDeltaRuleBackwardScratchBytes(call.Rule());
  OOM_CHECK(scratch_bytes <= call.MostScratchBytes());
  const at::Tensor scratch = ScratchBytes(scratch_bytes, dattended_TNV);
  GatedDeltaRuleBackward(call.Rule(), call.RuleInput(operands, saved.state.rule_DNKV),
                         {.output_TNV = DeviceData<float>(dattended_TNV),
                          .state_DNKV = DeviceData<float>(dstate_DNKV)},
                         {.query_TGK = DeviceData<float>(result.query),
                          .key_TGK = DeviceData<float>(result.key),
                          .value_TNV = DeviceData<float>(result.value),
                          .log_decay_TN = DeviceData<float>(result.log_decay),
                          .beta_TN = DeviceData<float>(result.beta),
                          .state_DNKV = DeviceData<float>(result.state)},
                         scratch.data_ptr(), OperatorStream());
  return result;
}

struct MixedGradients {
  at::Tensor mixed_TC;
  at::Tensor context_DPC;  // Wide; undefined where the context was.
};

MixedGradients ConvolutionBackward(const DeltaNetCall& call, const GatedDeltaNetSaved& saved,
                                   const RuleGradients& rule, const at::Tensor& dcontext_DPC,
                                   const at::Tensor& dconvolution) {
  MixedGradients result;
  result.mixed_TC = at::empty_like(saved.mixed_TC);
  if (saved.state.convolution_DPC.defined()) {
    result.context_DPC = EmptyWide(saved.state.convolution_DPC.sizes(), saved.mixed_TC);
  }
  const at::Tensor scratch =
      ScratchBytes(CausalConvolutionBackwardScratchBytes(call.Convolution()), saved.mixed_TC);
  CausalConvolutionBackward(call.Convolution(), call.ConvolutionInput(saved),
                            {.query = DeviceData<float>(rule.query),
                             .key = DeviceData<float>(rule.key),
                             .value = DeviceData<float>(rule.value),
                             .context_DPC = DeviceData<float>(dcontext_DPC)},
                            {.x_TC = DeviceData<Bfloat16>(result.mixed_TC),
                             .context_DPC = DeviceData<float>(result.context_DPC),
                             .weight_CJ = DeviceData<float>(dconvolution)},
                            scratch.data_ptr(), OperatorStream());
  return result;
}

struct GateGradients {
  at::Tensor b_TN;
  at::Tensor a_TN;
};

GateGradients GatesBackward(const DeltaNetCall& call, const GatedDeltaNetSaved& saved,
                            const RuleGradients& rule, const GatedDeltaNetTensors& gradients) {
  const GateGradients result{at::empty_like(saved.b_TN), at::empty_like(saved.a_TN)};
  const DeltaGateKernelInput input = call.GateInput(saved);
  const at::Tensor scratch = ScratchBytes(DeltaGatesBackwardScratchBytes(input), saved.b_TN);
  DeltaGatesBackward(input,
                     {.beta_TN = DeviceData<float>(rule.beta),
                      .log_decay_TN = DeviceData<float>(rule.log_decay),
                      .b_TN = DeviceData<Bfloat16>(result.b_TN),
                      .a_TN = DeviceData<Bfloat16>(result.a_TN),
                      .a_log_N = DeviceData<float>(gradients.a_log),
                      .dt_bias_N = DeviceData<float>(gradients.dt_bias)},
                     scratch.data_ptr(), OperatorStream());
  return result;
}

}  // namespace

DeltaNetBatch::DeltaNetBatch(const SequenceSegment& segment)
    : tokens(segment.tokens()),
      documents(segment.document_count()),
      chunks(DeltaChunkCount(segment.cu_seqlens)),
      continued(segment.continued) {
  static_assert(sizeof(DeltaChunk) == 2 * sizeof(int64_t));
  const at::TensorOptions options = segment.document_starts.options();
  cu_seqlens = at::empty({documents + 1}, options.dtype(at::kLong));
  chunk_list = at::empty({chunks, 2}, options.dtype(at::kLong));
  document_chunks = at::empty({documents + 1}, options.dtype(at::kInt));
  MakeDeltaChunks({.batch_starts = DeviceData<int32_t>(segment.document_starts),
                   .batch_documents = segment.document_starts.size(0) - 1,
                   .first_token = segment.first,
                   .tokens = tokens,
                   .documents = documents,
                   .chunk_count = chunks,
                   .cu_seqlens = DeviceData<int64_t>(cu_seqlens),
                   .chunks = reinterpret_cast<DeltaChunk*>(DeviceData<int64_t>(chunk_list)),
                   .document_chunks = DeviceData<int32_t>(document_chunks)},
                  OperatorStream());
}

GatedDeltaNetOutput CudaGatedDeltaNetForward(
    const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights, const at::Tensor& x_TH,
    const GatedDeltaNetState& state, const DeltaNetBatch& batch, GatedDeltaNetSaved* saved) {
  OOM_CHECK(x_TH.size(0) == batch.tokens);
  const DeltaNetCall call(shape, weights, batch);
  GatedDeltaNetSaved kept;
  kept.state = state;
  kept.input_TH = x_TH;
  kept.mixed_TC = at::linear(x_TH, weights.query_key_value);
  kept.gate_TNV = at::linear(x_TH, weights.gate).view({-1, shape.value_heads, shape.value_size});
  kept.b_TN = at::linear(x_TH, weights.beta);
  kept.a_TN = at::linear(x_TH, weights.decay);

  GatedDeltaNetOutput result;
  if (batch.continued) {
    result.state.convolution_DPC = at::empty(
        {batch.documents, kConvolutionTaps - 1, kept.mixed_TC.size(1)}, kept.mixed_TC.options());
    result.state.rule_DNKV = EmptyWide(
        {batch.documents, shape.value_heads, shape.key_size, shape.value_size}, kept.mixed_TC);
  }
  {
    const RuleOperands operands = call.Operands(kept, result.state.convolution_DPC);
    kept.attended_TNV = at::empty_like(operands.value);
    const at::Tensor scratch =
        ScratchBytes(GatedDeltaRuleForwardScratchBytes(call.Rule()), kept.mixed_TC);
    GatedDeltaRuleForward(call.Rule(), call.RuleInput(operands, state.rule_DNKV),
                          {.output_TNV = DeviceData<Bfloat16>(kept.attended_TNV),
                           .state_DNKV = DeviceData<float>(result.state.rule_DNKV)},
                          scratch.data_ptr(), OperatorStream());
  }
  result.y_TH = at::linear(call.Normed(kept), weights.output);
  if (saved != nullptr) *saved = std::move(kept);
  return result;
}

GatedDeltaNetGradients CudaGatedDeltaNetBackward(
    const GatedDeltaNetShape& shape, const GatedDeltaNetTensors& weights, const at::Tensor& dy_TH,
    const GatedDeltaNetState& dstate, const GatedDeltaNetSaved& saved, const DeltaNetBatch& batch,
    GatedDeltaNetTensors* gradients) {
  OOM_CHECK(dy_TH.size(0) == batch.tokens);
  const DeltaNetCall call(shape, weights, batch);
  AddWeightGradient(gradients->output, dy_TH, call.Normed(saved));
  NormGradients norm = NormBackward(call, saved, at::mm(dy_TH, weights.output), gradients->norm);
  const RuleGradients rule = RuleBackward(call, saved, norm.attended_TNV, dstate.rule_DNKV);
  norm.attended_TNV.reset();
  const MixedGradients mixed =
      ConvolutionBackward(call, saved, rule, dstate.convolution_DPC, gradients->convolution);
  const GateGradients gates = GatesBackward(call, saved, rule, *gradients);

  AddWeightGradient(gradients->query_key_value, mixed.mixed_TC, saved.input_TH);
  AddWeightGradient(gradients->gate, norm.gate_TM, saved.input_TH);
  AddWeightGradient(gradients->beta, gates.b_TN, saved.input_TH);
  AddWeightGradient(gradients->decay, gates.a_TN, saved.input_TH);
  GatedDeltaNetGradients result;
  result.x_TH = at::mm(mixed.mixed_TC, weights.query_key_value, at::kFloat);
  AddWideProduct(result.x_TH, norm.gate_TM, weights.gate);
  AddWideProduct(result.x_TH, gates.b_TN, weights.beta);
  AddWideProduct(result.x_TH, gates.a_TN, weights.decay);
  result.state = {.convolution_DPC = mixed.context_DPC, .rule_DNKV = rule.state};
  return result;
}

}  // namespace oom
