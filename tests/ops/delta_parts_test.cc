// Goal: the small operators of Gated DeltaNet have the derivatives that they claim; convolutions
// keep to their documents. Method: LibTorch's autograd of a plainly written forward, in double, at
// random points (seeds below).

#include <gtest/gtest.h>

#include "runtime/ops/causal_convolution.h"
#include "runtime/ops/delta_gates.h"
#include "runtime/ops/gated_rms_norm.h"
#include "runtime/ops/l2_norm.h"
#include "tests/ops/delta_net_reference.h"

namespace oom::testing {
namespace {

constexpr double kExact = 1e-12;

TEST(CausalConvolutionTest, ForwardAndBackwardAreThoseOfEachDocumentWithItsContext) {
  for (const int64_t taps : {4, 2, 1}) {
    SCOPED_TRACE(taps);
    // Documents shorter than the context hand on rows that they were given.
    const std::vector<int64_t> documents = {0, 1, 3, 3, 10};
    const at::Tensor x = Random({10, 7}, 110).requires_grad_();
    const at::Tensor weight = Random({7, taps}, 111).requires_grad_();
    const at::Tensor context = Random({4, taps - 1, 7}, 112).requires_grad_();
    const at::Tensor dy = Random({10, 7}, 113);
    const at::Tensor dcontext = Random({4, taps - 1, 7}, 114);
    std::vector<at::Tensor> outputs, contexts;
    for (size_t i = 0; i + 1 < documents.size(); ++i) {
      const at::Tensor before = context[static_cast<int64_t>(i)];
      const at::Tensor rows = x.slice(0, documents[i], documents[i + 1]);
      if (rows.size(0) > 0) outputs.push_back(ReferenceConvolution(rows, weight, before));
      contexts.push_back(at::cat({before, rows}).slice(0, rows.size(0)));
    }
    const at::Tensor y = at::cat(outputs), carried = at::stack(contexts);
    const at::Tensor sum = (y * dy).sum() + (carried * dcontext).sum();
    const std::vector<at::Tensor> derivatives =
        Autograd(sum, at::ones_like(sum), {x, weight, context});

    const CausalConvolutionOutput actual =
        CausalConvolutionForward(x.detach(), weight.detach(), context.detach(), documents);
    ExpectNear(actual.y_TC, y, kExact, "y");
    ExpectNear(actual.context_DPC, carried, 0.0, "context");
    at::Tensor dweight = at::ones({7, taps}, at::kDouble);
    const CausalConvolutionGradients gradients =
        CausalConvolutionBackward({.dy_TC = dy,
                                   .dcontext_DPC = dcontext,
                                   .x_TC = x.detach(),
                                   .context_DPC = context.detach()},
                                  weight.detach(), documents, dweight);
    ExpectNear(gradients.x_TC, derivatives[0], kExact, "dx");
    ExpectNear(dweight.sub(1), derivatives[1], kExact, "dweight accumulates");
    ExpectNear(gradients.context_DPC, derivatives[2], kExact, "dcontext");
  }
}

TEST(CausalConvolutionDeathTest, ASegmentWithoutTokensIsRefused) {
  EXPECT_DEATH(CausalConvolutionForward(Random({0, 3}, 1), Random({3, 4}, 2), at::Tensor(), {0, 0}),
               "at least one token");
}

TEST(L2NormTest, BackwardIsTheDerivativeOfForward) {
  // Also vectors so short that epsilon counts.
  const at::Tensor x =
      Random({9, 2, 6}, 120).mul_(Random({9, 1, 1}, 121).mul_(4).sub_(3).exp_()).requires_grad_();
  const at::Tensor dy = Random({9, 2, 6}, 122);
  const at::Tensor y = x / (x.square().sum(-1, true) + 1e-3).sqrt();
  ExpectNear(L2NormForward(x.detach(), 1e-3), y, kExact, "y");
  ExpectNear(L2NormBackward(dy, x.detach(), 1e-3), Autograd(y, dy, {x})[0], kExact, "dx");
}

TEST(DeltaGatesTest, BackwardIsTheDerivativeOfForward) {
  const at::Tensor b = Random({12, 3}, 130).mul_(3).requires_grad_();
  // Some above 20, where softplus is linear.
  const at::Tensor a = Random({12, 3}, 131).mul_(20).requires_grad_();
  const at::Tensor a_log = Random({3}, 132).requires_grad_();
  const at::Tensor dt_bias = Random({3}, 133).requires_grad_();
  const at::Tensor dbeta = Random({12, 3}, 134), dlog_decay = Random({12, 3}, 135);
  ASSERT_GT((a + dt_bias).max().item<double>(), 20.0);
  const at::Tensor beta = b.sigmoid();
  const at::Tensor log_decay = -a_log.exp() * at::softplus(a + dt_bias, 1, 20);
  const at::Tensor sum = (beta * dbeta).sum() + (log_decay * dlog_decay).sum();
  const std::vector<at::Tensor> derivatives =
      Autograd(sum, at::ones_like(sum), {b, a, a_log, dt_bias});

  const DeltaGateInput input = {.b_TN = b.detach(),
                                .a_TN = a.detach(),
                                .a_log_N = a_log.detach(),
                                .dt_bias_N = dt_bias.detach()};
  const DeltaGates gates = DeltaGatesForward(input);
  ExpectNear(gates.beta_TN, beta, kExact, "beta");
  ExpectNear(gates.log_decay_TN, log_decay, kExact, "log decay");
  at::Tensor da_log = at::ones({3}, at::kDouble), ddt_bias = at::ones({3}, at::kDouble);
  const DeltaGateGradients gradients =
      DeltaGatesBackward({.beta_TN = dbeta, .log_decay_TN = dlog_decay}, input, da_log, ddt_bias);
  ExpectNear(gradients.b_TN, derivatives[0], kExact, "db");
  ExpectNear(gradients.a_TN, derivatives[1], kExact, "da");
  ExpectNear(da_log.sub(1), derivatives[2], kExact, "dA_log accumulates");
  ExpectNear(ddt_bias.sub(1), derivatives[3], kExact, "ddt_bias accumulates");
}

TEST(GatedRmsNormTest, BackwardIsTheDerivativeOfForward) {
  const at::Tensor x =
      Random({9, 4, 6}, 140).mul_(Random({9, 1, 1}, 141).mul_(2).exp_()).requires_grad_();
  const at::Tensor gate = Random({9, 4, 6}, 142).mul_(3).requires_grad_();
  const at::Tensor weight = Random({6}, 143).requires_grad_();
  const at::Tensor dy = Random({9, 4, 6}, 144);
  const at::Tensor y =
      x / (x.square().mean(-1, true) + 1e-3).sqrt() * weight * gate * gate.sigmoid();
  const std::vector<at::Tensor> derivatives = Autograd(y, dy, {x, gate, weight});

  ExpectNear(GatedRmsNormForward(x.detach(), gate.detach(), weight.detach(), 1e-3), y, kExact, "y");
  at::Tensor dweight = at::ones({6}, at::kDouble);
  const GatedRmsNormGradients gradients =
      GatedRmsNormBackward(dy, x.detach(), gate.detach(), weight.detach(), 1e-3, dweight);
  ExpectNear(gradients.x, derivatives[0], kExact, "dx");
  ExpectNear(gradients.gate, derivatives[1], kExact, "dgate");
  ExpectNear(dweight.sub(1), derivatives[2], kExact, "dweight accumulates");
}

}  // namespace
}  // namespace oom::testing
