// Goal: the kernels around the delta rule are runtime/ops/causal_convolution with l2_norm,
// delta_gates and gated_rms_norm, across documents, with and without contexts, and repeat bit for
// bit. Method: the composites on the CPU, in BF16 and, as the truth, in FP64.

#include <gtest/gtest.h>

#include "runtime/kernels/causal_convolution.h"
#include "runtime/kernels/delta_gates.h"
#include "runtime/kernels/gated_rms_norm.h"
#include "runtime/ops/causal_convolution.h"
#include "runtime/ops/delta_gates.h"
#include "runtime/ops/gated_rms_norm.h"
#include "runtime/ops/l2_norm.h"
#include "tests/gpu/delta_net/delta_net_testing.h"

namespace oom::testing {
namespace {

using Bfloat16 = __nv_bfloat16;

constexpr double kLengthEpsilon = 1e-6;
constexpr int64_t kKeyWidth = 256, kValueWidth = 512;
constexpr int64_t kChannels = 2 * kKeyWidth + kValueWidth;
// Factor on a composite's error where a kernel rounds the same results once.
constexpr double kSameRounding = 1.05;

// Documents shorter than a context, an empty one, and ends within, at and behind a strip of tokens.
const std::vector<std::vector<int64_t>> kDocuments = {
    {0, 1}, {0, 64}, {0, 1, 3, 3, 7, 70, 200}, {0, 2, 5, 9, 14, 15, 16}, {0, 1500}, {0, 511, 1029}};

struct ConvolutionTensors {
  at::Tensor x, weight, context, dquery, dkey, dvalue, dcontext;
};

ConvolutionTensors RandomTensors(const std::vector<int64_t>& cu_seqlens, bool contexts) {
  const int64_t tokens = cu_seqlens.back();
  const auto documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  ConvolutionTensors t;
  t.x = Random({tokens, kChannels}, 1, at::kBFloat16);
  t.weight = Random({kChannels, 4}, 2).mul_(0.5).to(at::kBFloat16);
  t.dquery = Random({tokens, kKeyWidth}, 3, at::kFloat);
  t.dkey = Random({tokens, kKeyWidth}, 4, at::kFloat);
  t.dvalue = Random({tokens, kValueWidth}, 5, at::kFloat);
  if (contexts) {
    t.context = Random({documents, 3, kChannels}, 6, at::kBFloat16);
    t.dcontext = Random({documents, 3, kChannels}, 7, at::kFloat);
  }
  return t;
}

// The seven results: q, k, v, context; dx, dcontext (undefined without one), dw.
std::vector<at::Tensor> Composite(const ConvolutionTensors& t, at::ScalarType type,
                                  const std::vector<int64_t>& cu_seqlens) {
  const auto as = [&](const at::Tensor& x) { return x.defined() ? x.to(type) : x; };
  const auto wide = [&](const at::Tensor& x) {
    return x.defined() && type == at::kDouble ? x.to(type) : x;
  };
  const auto heads = [](const at::Tensor& x) { return x.view({x.size(0), -1, 128}); };
  const CausalConvolutionOutput u =
      CausalConvolutionForward(as(t.x), as(t.weight), as(t.context), cu_seqlens);
  const at::Tensor query = heads(u.y_TC.narrow(1, 0, kKeyWidth));
  const at::Tensor key = heads(u.y_TC.narrow(1, kKeyWidth, kKeyWidth));
  const at::Tensor du =
      at::cat({L2NormBackward(heads(wide(t.dquery)), query, kLengthEpsilon).flatten(1),
               L2NormBackward(heads(wide(t.dkey)), key, kLengthEpsilon).flatten(1), wide(t.dvalue)},
              1);
  at::Tensor dweight = at::ones(t.weight.sizes(), type == at::kDouble ? at::kDouble : at::kFloat);
  const CausalConvolutionGradients gradients =
      CausalConvolutionBackward({.dy_TC = du,
                                 .dcontext_DPC = wide(t.dcontext),
                                 .x_TC = as(t.x),
                                 .context_DPC = as(t.context)},
                                as(t.weight), cu_seqlens, dweight);
  return {L2NormForward(query, kLengthEpsilon).flatten(1),
          L2NormForward(key, kLengthEpsilon).flatten(1),
          u.y_TC.narrow(1, 2 * kKeyWidth, kValueWidth),
          u.context_DPC,
          gradients.x_TC,
          gradients.context_DPC,
          dweight};
}

std::vector<at::Tensor> Kernels(const ConvolutionTensors& t,
                                const std::vector<int64_t>& cu_seqlens) {
  const at::Tensor x = OnGpu(t.x), weight = OnGpu(t.weight), context = OnGpu(t.context);
  const at::Tensor dquery = OnGpu(t.dquery), dkey = OnGpu(t.dkey), dvalue = OnGpu(t.dvalue);
  const at::Tensor dcontext = OnGpu(t.dcontext);
  const at::Tensor starts = OnGpu(at::tensor(cu_seqlens, at::kLong));
  const int64_t tokens = x.size(0);
  const auto documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  const CausalConvolutionShape shape{
      .tokens = tokens, .documents = documents, .key_width = kKeyWidth, .value_width = kValueWidth};
  const auto narrow = [](const at::Tensor& y) {
    return y.defined() ? static_cast<Bfloat16*>(y.data_ptr()) : nullptr;
  };
  const auto wide = [](const at::Tensor& y) { return y.defined() ? y.data_ptr<float>() : nullptr; };
  const CausalConvolutionKernelInput input{.x_TC = narrow(x),
                                           .weight_CJ = narrow(weight),
                                           .context_DPC = narrow(context),
                                           .cu_seqlens = starts.data_ptr<int64_t>()};
  const at::Tensor query = Unwritten({tokens, kKeyWidth}, at::kHalf),
                   key = Unwritten({tokens, kKeyWidth}, at::kHalf);
  const at::Tensor value = Unwritten({tokens, kValueWidth}, at::kBFloat16);
  const at::Tensor context_out = Unwritten({documents, 3, kChannels}, at::kBFloat16);
  CausalConvolutionForward(shape, input,
                           {.query = static_cast<__half*>(query.data_ptr()),
                            .key = static_cast<__half*>(key.data_ptr()),
                            .value = narrow(value),
                            .context_DPC = narrow(context_out)},
                           nullptr);
  const at::Tensor dx = Unwritten(x.sizes(), at::kBFloat16);
  const at::Tensor dcontext_in =
      context.defined() ? Unwritten(context.sizes(), at::kFloat) : at::Tensor();
  const at::Tensor dweight = at::ones(t.weight.sizes(), x.options().dtype(at::kFloat));
  const at::Tensor scratch = UnwrittenBytes(CausalConvolutionBackwardScratchBytes(shape));
  CausalConvolutionBackward(
      shape, input,
      {.query = wide(dquery),
       .key = wide(dkey),
       .value = wide(dvalue),
       .context_DPC = wide(dcontext)},
      {.x_TC = narrow(dx), .context_DPC = wide(dcontext_in), .weight_CJ = wide(dweight)},
      scratch.data_ptr(), nullptr);
  return {query, key, value, context_out, dx, dcontext_in, dweight};
}

TEST(CausalConvolutionKernelTest, IsAsNearToTheTruthAsTheComposites) {
  const std::vector<std::string> names = {"q", "k", "v", "context", "dx", "dcontext", "dw"};
  for (const std::vector<int64_t>& cu_seqlens : kDocuments) {
    for (const bool contexts : {false, true}) {
      std::printf("%d documents, %d tokens, contexts %d\n", static_cast<int>(cu_seqlens.size()) - 1,
                  static_cast<int>(cu_seqlens.back()), contexts);
      const ConvolutionTensors tensors = RandomTensors(cu_seqlens, contexts);
      const std::vector<at::Tensor> exact = Composite(tensors, at::kDouble, cu_seqlens);
      const std::vector<at::Tensor> composite = Composite(tensors, at::kBFloat16, cu_seqlens);
      const std::vector<at::Tensor> actual = Kernels(tensors, cu_seqlens);
      for (size_t i = 0; i < names.size(); ++i) {
        if (!exact[i].defined()) continue;
        ExpectNoWorse(names[i], actual[i], composite[i], exact[i], kSameRounding);
      }
      ExpectBitEqual(actual, Kernels(tensors, cu_seqlens), "convolution");
    }
  }
}

TEST(DeltaGatesKernelTest, IsAsNearToTheTruthAsTheComposite) {
  for (const auto& [tokens, heads] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {777, 32}, {100, 48}, {40000, 4}}) {
    std::printf("%d tokens, %d heads\n", static_cast<int>(tokens), static_cast<int>(heads));
    const at::Tensor b = Random({tokens, heads}, 1).mul_(2).to(at::kBFloat16);
    const at::Tensor a = Random({tokens, heads}, 2).mul_(15).to(at::kBFloat16);
    const at::Tensor a_log = Random({heads}, 3, at::kFloat),
                     dt_bias = Random({heads}, 4, at::kFloat);
    const at::Tensor dbeta = Random({tokens, heads}, 5, at::kFloat);
    const at::Tensor dlog_decay = Random({tokens, heads}, 6, at::kFloat);
    const auto composite = [&](at::ScalarType type) {
      const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
      const DeltaGateInput input{.b_TN = b.to(type),
                                 .a_TN = a.to(type),
                                 .a_log_N = a_log.to(wide),
                                 .dt_bias_N = dt_bias.to(wide)};
      const DeltaGates gates = DeltaGatesForward(input);
      at::Tensor da_log = at::ones({heads}, wide), ddt_bias = at::ones({heads}, wide);
      const DeltaGateGradients gradients =
          DeltaGatesBackward({.beta_TN = dbeta.to(wide), .log_decay_TN = dlog_decay.to(wide)},
                             input, da_log, ddt_bias);
      return std::vector<at::Tensor>{
          gates.beta_TN, gates.log_decay_TN, gradients.b_TN, gradients.a_TN, da_log, ddt_bias};
    };
    const auto kernels = [&] {
      const at::Tensor on_b = OnGpu(b), on_a = OnGpu(a), on_a_log = OnGpu(a_log);
      const at::Tensor on_dt_bias = OnGpu(dt_bias), on_dbeta = OnGpu(dbeta),
                       on_dg = OnGpu(dlog_decay);
      const DeltaGateKernelInput input{.tokens = tokens,
                                       .value_heads = static_cast<int>(heads),
                                       .b_TN = static_cast<const Bfloat16*>(on_b.data_ptr()),
                                       .a_TN = static_cast<const Bfloat16*>(on_a.data_ptr()),
                                       .a_log_N = on_a_log.data_ptr<float>(),
                                       .dt_bias_N = on_dt_bias.data_ptr<float>()};
      const at::Tensor beta = Unwritten(b.sizes(), at::kFloat),
                       g = Unwritten(b.sizes(), at::kFloat);
      DeltaGatesForward(input, beta.data_ptr<float>(), g.data_ptr<float>(), nullptr);
      const at::Tensor db = Unwritten(b.sizes(), at::kBFloat16),
                       da = Unwritten(b.sizes(), at::kBFloat16);
      const at::Tensor da_log = OnGpu(at::ones({heads}, at::kFloat)), ddt_bias = da_log.clone();
      const at::Tensor scratch = UnwrittenBytes(DeltaGatesBackwardScratchBytes(input));
      DeltaGatesBackward(input,
                         {.beta_TN = on_dbeta.data_ptr<float>(),
                          .log_decay_TN = on_dg.data_ptr<float>(),
                          .b_TN = static_cast<Bfloat16*>(db.data_ptr()),
                          .a_TN = static_cast<Bfloat16*>(da.data_ptr()),
                          .a_log_N = da_log.data_ptr<float>(),
                          .dt_bias_N = ddt_bias.data_ptr<float>()},
                         scratch.data_ptr(), nullptr);
      return std::vector<at::Tensor>{beta, g, db, da, da_log, ddt_bias};
    };
    const std::vector<std::string> names = {"beta", "g", "db", "da", "dA_log", "ddt_bias"};
    const std::vector<at::Tensor> actual = kernels(), exact = composite(at::kDouble);
    const std::vector<at::Tensor> narrow = composite(at::kBFloat16);
    for (size_t i = 0; i < names.size(); ++i) {
      ExpectNoWorse(names[i], actual[i], narrow[i], exact[i], kSameRounding);
    }
    ExpectBitEqual(actual, kernels(), "gates");
  }
}

TEST(GatedRmsNormKernelTest, IsAsNearToTheTruthAsTheComposite) {
  constexpr double kEpsilon = 1e-6;
  for (const int64_t rows : {int64_t{1}, int64_t{17}, int64_t{1003}, int64_t{50000}}) {
    std::printf("%d rows\n", static_cast<int>(rows));
    // Rows of very different size, so that epsilon matters in some.
    const at::Tensor x =
        Random({rows, 128}, 1).mul_(Random({rows, 1}, 2).mul_(3).exp_()).to(at::kBFloat16);
    const at::Tensor gate = Random({rows, 128}, 3, at::kBFloat16),
                     dy = Random({rows, 128}, 4, at::kBFloat16);
    const at::Tensor weight = Random({128}, 5).mul_(0.2).add_(1).to(at::kFloat);
    const auto composite = [&](at::ScalarType type) {
      const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
      at::Tensor dweight = at::ones({128}, wide);
      const at::Tensor y =
          GatedRmsNormForward(x.to(type), gate.to(type), weight.to(wide), kEpsilon);
      const GatedRmsNormGradients gradients = GatedRmsNormBackward(
          dy.to(type), x.to(type), gate.to(type), weight.to(wide), kEpsilon, dweight);
      return std::vector<at::Tensor>{y, gradients.x, gradients.gate, dweight};
    };
    const auto kernels = [&](bool wants_weight) {
      const at::Tensor on_x = OnGpu(x), on_gate = OnGpu(gate), on_dy = OnGpu(dy),
                       on_weight = OnGpu(weight);
      const auto narrow = [](const at::Tensor& t) { return static_cast<Bfloat16*>(t.data_ptr()); };
      const GatedRmsNormInput input{.rows = rows,
                                    .epsilon = static_cast<float>(kEpsilon),
                                    .x_RV = narrow(on_x),
                                    .gate_RV = narrow(on_gate),
                                    .weight_V = on_weight.data_ptr<float>()};
      const at::Tensor y = Unwritten(x.sizes(), at::kBFloat16),
                       dx = Unwritten(x.sizes(), at::kFloat);
      const at::Tensor dgate = Unwritten(x.sizes(), at::kBFloat16);
      const at::Tensor dweight = OnGpu(at::ones({128}, at::kFloat));
      GatedRmsNormForward(input, narrow(y), nullptr);
      const at::Tensor scratch = UnwrittenBytes(GatedRmsNormBackwardScratchBytes());
      GatedRmsNormBackward(input, narrow(on_dy),
                           {.x_RV = dx.data_ptr<float>(),
                            .gate_RV = narrow(dgate),
                            .weight_V = wants_weight ? dweight.data_ptr<float>() : nullptr},
                           scratch.data_ptr(), nullptr);
      return std::vector<at::Tensor>{y, dx, dgate, wants_weight ? dweight : at::Tensor()};
    };
    const std::vector<std::string> names = {"y", "dx", "dz", "dw"};
    const std::vector<at::Tensor> actual = kernels(true), exact = composite(at::kDouble);
    const std::vector<at::Tensor> narrow = composite(at::kBFloat16);
    for (size_t i = 0; i < names.size(); ++i) {
      ExpectNoWorse(names[i], actual[i], narrow[i], exact[i], kSameRounding);
    }
    ExpectBitEqual(actual, kernels(true), "gated norm");
    ExpectBitEqual(kernels(false), actual, "gated norm without dw");
  }
}

}  // namespace
}  // namespace oom::testing
