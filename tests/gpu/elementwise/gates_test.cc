// Goal: the kernels are the gate behind attention (runtime/ops/attention) and that of the shared
// expert (runtime/ops/shared_expert). Method: the composite's operators on the same CUDA tensors,
// in BF16 and in FP64; gates lie behind other columns.

#include "runtime/kernels/output_gate.h"
#include "runtime/kernels/token_gate.h"
#include "runtime/ops/precision.h"
#include "tests/gpu/elementwise/elementwise_testing.h"

namespace oom::testing {
namespace {

using T = __nv_bfloat16;

struct Rows {
  int64_t rows;
  int64_t width;
};
const std::vector<Rows> kRows = {{0, 256}, {1, 256},  {3001, 256}, {70, 128}, {65, 512},
                                 {9, 16},  {33, 100}, {5, 7},      {4, 5000}, {257, 2048}};

// Also far out on both sides, where exponentials overflow and vanish.
at::Tensor Logits(at::IntArrayRef sizes, uint64_t seed) {
  at::Tensor logits = Random(sizes, seed).mul_(3);
  if (logits.numel() > 0) logits.select(0, logits.size(0) / 2).mul_(60);
  return logits.to(at::kBFloat16);
}

struct OutputGateResult {
  at::Tensor a, dattention, dgate;
};

OutputGateResult Composite(const at::Tensor& da, const at::Tensor& o, const at::Tensor& gate) {
  const at::Tensor s = at::sigmoid(gate);
  return {at::mul(o, s), at::mul(da, s), at::sigmoid_backward(at::mul(da, o), s)};
}

TEST(OutputGateKernelTest, ForwardAndBackwardAreTheComposite) {
  for (const Rows& shape : kRows) {
    SCOPED_TRACE(::testing::Message() << shape.rows << " rows of " << shape.width);
    const at::Tensor both = Logits({shape.rows, 2 * shape.width}, 1);
    const at::Tensor gate = both.narrow(1, shape.width, shape.width);
    const at::Tensor o = Random({shape.rows, shape.width}, 2, at::kBFloat16);
    const at::Tensor da = Random({shape.rows, shape.width}, 3, at::kBFloat16);
    const OutputGateShape kernel_shape{
        .rows = shape.rows, .width = shape.width, .gate_stride = 2 * shape.width};
    const at::Tensor a = Unwritten(o.sizes(), at::kBFloat16),
                     a_again = Unwritten(o.sizes(), at::kBFloat16);
    const at::Tensor dboth = Random(both.sizes(), 4, at::kBFloat16);
    const at::Tensor dquery = dboth.narrow(1, 0, shape.width).clone();
    const at::Tensor dgate = dboth.narrow(1, shape.width, shape.width);
    const at::Tensor in_place = da.clone();
    OutputGateForward(kernel_shape, Data<T>(o), Data<T>(gate), Data<T>(a), nullptr);
    OutputGateBackward(kernel_shape,
                       {.da_Rd = Data<T>(in_place),
                        .o_Rd = Data<T>(o),
                        .gate_Rd = Data<T>(gate),
                        .a_Rd = Data<T>(a_again),
                        .do_Rd = Data<T>(in_place),
                        .dgate_Rd = Data<T>(dgate)},
                       nullptr);
    const OutputGateResult composite = Composite(da, o, gate);
    const OutputGateResult exact =
        Composite(da.to(at::kDouble), o.to(at::kDouble), gate.to(at::kDouble));
    ExpectAsExactAs(composite.a, a, exact.a, "a");
    EXPECT_TRUE(BitEqual(a, a_again)) << "backward's a";
    ExpectAsExactAs(composite.dattention, in_place, exact.dattention, "do");
    ExpectAsExactAs(composite.dgate, dgate, exact.dgate, "dgate");
    EXPECT_TRUE(BitEqual(dboth.narrow(1, 0, shape.width), dquery)) << "wrote beside the gate";
  }
}

struct TokenGateResult {
  at::Tensor y, df, dlogit;
};

// As the shared expert and the mixture do it; dlogit rounded to `type`.
TokenGateResult Composite(const at::Tensor& dy, const at::Tensor& f, const at::Tensor& logit,
                          const at::Tensor& residual) {
  const at::Tensor s = at::sigmoid(logit);
  const at::Tensor ds = at::mul(Wide(dy), Wide(f)).sum(1, /*keepdim=*/true);
  return {at::mul(f, s).add_(residual), at::mul(dy, s),
          at::sigmoid_backward(ds, Wide(s)).to(dy.scalar_type())};
}

TEST(TokenGateKernelTest, ForwardAndBackwardAreTheComposite) {
  for (const Rows& shape : kRows) {
    SCOPED_TRACE(::testing::Message() << shape.rows << " tokens of " << shape.width);
    const at::Tensor logit = Logits({shape.rows, 1}, 1);
    const auto random = [&](uint64_t seed) {
      return Random({shape.rows, shape.width}, seed, at::kBFloat16);
    };
    const at::Tensor f = random(2), residual = random(3), dy = random(4);
    const at::Tensor y = f.clone(), df = f.clone();
    const at::Tensor dlogit = Unwritten(logit.sizes(), at::kBFloat16);
    TokenGateForward({.tokens = shape.rows, .width = shape.width},
                     {.f_TH = Data<T>(y),
                      .logit_T = Data<T>(logit),
                      .residual_TH = Data<T>(residual),
                      .y_TH = Data<T>(y)},
                     nullptr);
    TokenGateBackward({.tokens = shape.rows, .width = shape.width},
                      {.dy_TH = Data<T>(dy),
                       .f_TH = Data<T>(df),
                       .logit_T = Data<T>(logit),
                       .df_TH = Data<T>(df),
                       .dlogit_T = Data<T>(dlogit)},
                      nullptr);
    const TokenGateResult composite = Composite(dy, f, logit, residual);
    const TokenGateResult exact = Composite(dy.to(at::kDouble), f.to(at::kDouble),
                                            logit.to(at::kDouble), residual.to(at::kDouble));
    ExpectAsExactAs(composite.y, y, exact.y, "y");
    ExpectAsExactAs(composite.df, df, exact.df, "df");
    ExpectAsExactAs(composite.dlogit, dlogit, exact.dlogit, "dlogit");
  }
}

}  // namespace
}  // namespace oom::testing
