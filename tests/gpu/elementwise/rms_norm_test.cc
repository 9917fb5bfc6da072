// Goal: the kernels are runtime/ops/rms_norm and its uses in runtime/ops/attention and mixture.
// Method: the composite operators on the same CUDA tensors, in the activations' type and in FP64;
// widths of every way to hold a row, aligned and not.

#include "runtime/kernels/rms_norm.h"

#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"
#include "tests/gpu/elementwise/elementwise_testing.h"

namespace oom::testing {
namespace {

constexpr float kEpsilon = 1e-6f;
const NormRule kRule = {.epsilon = kEpsilon};

struct Scaling {
  std::string name;
  NormScale scale;
  bool weighted = true;

  NormRule rule() const { return {.epsilon = kEpsilon, .scale = scale}; }
};
const std::vector<Scaling> kScalings = {
    {"w after rounding", NormScale::kWeightAfterRounding},
    {"w", NormScale::kWeight},
    {"1 + w", NormScale::kOnePlusWeight},
    {"no weight", NormScale::kWeight, false},
    {"no weight, whatever the rule", NormScale::kWeightAfterRounding, false}};

struct Rows {
  int64_t rows;
  int64_t width;
};
const std::vector<Rows> kRows = {{0, 128},    {1, 128},     {7, 20},    {5, 33},   {2, 5},
                                 {300, 128},  {20000, 128}, {77, 256},  {9, 1000}, {19, 2048},
                                 {900, 2048}, {257, 4096},  {33, 2880}, {5, 8192}, {3, 16384}};

// Rows of very different size, so that epsilon matters in some.
template <class T>
at::Tensor Input(const Rows& shape, uint64_t seed) {
  return Random({shape.rows, shape.width}, seed)
      .mul_(Random({shape.rows, 1}, seed + 100).mul_(3).exp_())
      .to(ScalarTypeOf<T>());
}
template <class T>
at::Tensor Weight(int64_t width) {
  return Random({width}, 7).mul_(0.2).add_(1).to(ScalarTypeOf<T>());
}
at::Tensor Exact(const at::Tensor& weight) {
  return weight.defined() ? weight.to(at::kDouble) : weight;
}

template <class T>
class RmsNormKernelTest : public ElementwiseTest<T> {};
TYPED_TEST_SUITE(RmsNormKernelTest, ActivationTypes);

TYPED_TEST(RmsNormKernelTest, ForwardIsTheComposite) {
  using T = TypeParam;
  for (const Scaling& scaling : kScalings) {
    for (const Rows& shape : kRows) {
      const at::Tensor x = Input<T>(shape, 1);
      const at::Tensor weight = scaling.weighted ? Weight<T>(shape.width) : at::Tensor();
      const at::Tensor y = Unwritten(x.sizes(), x.scalar_type());
      RmsNormForward({.rows = shape.rows, .width = shape.width},
                     RmsNormForwardArguments<T>{.x_RH = Data<T>(x),
                                                .weight_H = Data<T>(weight),
                                                .scale = scaling.scale,
                                                .epsilon = kEpsilon,
                                                .y_RH = Data<T>(y)},
                     nullptr);
      const NormRule rule = scaling.rule();
      ExpectAsExactAs(RmsNormForward(x, weight, rule), y,
                      RmsNormForward(x.to(at::kDouble), Exact(weight), rule),
                      "y of width " + std::to_string(shape.width) + ", " + scaling.name);
    }
  }
}

TYPED_TEST(RmsNormKernelTest, ForwardOfRowsThatAreNotAlignedIsTheSame) {
  using T = TypeParam;
  const Rows shape{11, 128};
  const at::Tensor aligned = Input<T>(shape, 1), weight = Weight<T>(shape.width);
  const at::Tensor x =
      at::cat({aligned.flatten().narrow(0, 0, 1), aligned.flatten()}).narrow(0, 1, aligned.numel());
  const at::Tensor y = Unwritten({shape.rows * shape.width + 1}, x.scalar_type());
  RmsNormForward({.rows = shape.rows, .width = shape.width},
                 RmsNormForwardArguments<T>{.x_RH = Data<T>(x),
                                            .weight_H = Data<T>(weight),
                                            .epsilon = kEpsilon,
                                            .y_RH = Data<T>(y) + 1},
                 nullptr);
  ExpectAsExactAs(RmsNormForward(aligned, weight, kRule),
                  y.narrow(0, 1, aligned.numel()).view_as(aligned),
                  RmsNormForward(aligned.to(at::kDouble), weight.to(at::kDouble), kRule), "y");
  EXPECT_TRUE(y.isnan()[0].template item<bool>()) << "wrote before its rows";
}

template <class T>
void ExpectSumIsNormed(const Scaling& scaling) {
  for (const Rows& shape : kRows) {
    SCOPED_TRACE(scaling.name);
    const at::Tensor x = Input<T>(shape, 2), residual = Input<T>(shape, 3);
    const at::Tensor weight = scaling.weighted ? Weight<T>(shape.width) : at::Tensor();
    const at::Tensor sum = Unwritten(x.sizes(), x.scalar_type()), y = at::empty_like(sum);
    RmsNormForward({.rows = shape.rows, .width = shape.width},
                   RmsNormForwardArguments<T>{.x_RH = Data<T>(x),
                                              .residual_RH = Data<T>(residual),
                                              .weight_H = Data<T>(weight),
                                              .scale = scaling.scale,
                                              .epsilon = kEpsilon,
                                              .sum_RH = Data<T>(sum),
                                              .y_RH = Data<T>(y)},
                   nullptr);
    EXPECT_TRUE(BitEqual(sum, at::add(x, residual)));
    const at::Tensor again = Unwritten(x.sizes(), x.scalar_type());
    RmsNormForward({.rows = shape.rows, .width = shape.width},
                   RmsNormForwardArguments<T>{.x_RH = Data<T>(sum),
                                              .weight_H = Data<T>(weight),
                                              .scale = scaling.scale,
                                              .epsilon = kEpsilon,
                                              .y_RH = Data<T>(again)},
                   nullptr);
    EXPECT_TRUE(BitEqual(y, again)) << shape.width;

    // In place of its inputs.
    const at::Tensor x_copy = x.clone(), residual_copy = residual.clone();
    RmsNormForward({.rows = shape.rows, .width = shape.width},
                   RmsNormForwardArguments<T>{.x_RH = Data<T>(x_copy),
                                              .residual_RH = Data<T>(residual_copy),
                                              .weight_H = Data<T>(weight),
                                              .scale = scaling.scale,
                                              .epsilon = kEpsilon,
                                              .sum_RH = Data<T>(residual_copy),
                                              .y_RH = Data<T>(x_copy)},
                   nullptr);
    EXPECT_TRUE(BitEqual(residual_copy, sum) && BitEqual(x_copy, y)) << shape.width;
  }
}

TYPED_TEST(RmsNormKernelTest, SumWithAResidualIsRoundedOnceAndThenNormed) {
  for (const Scaling& scaling : kScalings) ExpectSumIsNormed<TypeParam>(scaling);
}

// Also in place of the addend.
template <class T>
void ExpectFinishedNorm(const Rows& shape, const Scaling& scaling, bool with_addend,
                        bool with_factor) {
  SCOPED_TRACE(::testing::Message()
               << shape.rows << " rows of " << shape.width << ", " << scaling.name
               << (with_addend ? ", addend" : "") << (with_factor ? ", factor" : ""));
  const at::Tensor x = Input<T>(shape, 8), addend = Random(x.sizes(), 9, x.scalar_type());
  const at::Tensor weight = scaling.weighted ? Weight<T>(shape.width) : at::Tensor();
  const at::Tensor factor = at::full({1}, 0.0188, x.options().dtype(at::kFloat));
  const auto run = [&](const T* added, const float* times, const at::Tensor& y) {
    RmsNormForward({.rows = shape.rows, .width = shape.width},
                   RmsNormForwardArguments<T>{.x_RH = Data<T>(x),
                                              .weight_H = Data<T>(weight),
                                              .scale = scaling.scale,
                                              .epsilon = kEpsilon,
                                              .addend_RH = added,
                                              .factor = times,
                                              .y_RH = Data<T>(y)},
                   nullptr);
  };
  at::Tensor expected = Unwritten(x.sizes(), x.scalar_type());
  run(nullptr, nullptr, expected);
  if (with_addend) expected.add_(addend);
  if (with_factor) expected.mul_(factor);
  const float* const times = with_factor ? Data<float>(factor) : nullptr;
  const at::Tensor y = Unwritten(x.sizes(), x.scalar_type());
  run(with_addend ? Data<T>(addend) : nullptr, times, y);
  EXPECT_TRUE(BitEqual(y, expected));
  if (!with_addend) return;
  run(Data<T>(addend), times, addend);
  EXPECT_TRUE(BitEqual(addend, expected));
}

TYPED_TEST(RmsNormKernelTest, AddendAndFactorComeBehindTheRoundedNorm) {
  for (const Scaling& scaling : kScalings) {
    for (const Rows& shape : kRows) {
      ExpectFinishedNorm<TypeParam>(shape, scaling, true, false);
      ExpectFinishedNorm<TypeParam>(shape, scaling, false, true);
      ExpectFinishedNorm<TypeParam>(shape, scaling, true, true);
    }
  }
}

template <class T, class Dy, class Dx, class Residual = T>
void ExpectBackwardIsTheComposite(const Rows& shape, bool with_residual,
                                  const Scaling& scaling = kScalings.front()) {
  SCOPED_TRACE(::testing::Message()
               << shape.rows << " rows of " << shape.width << ", dy " << sizeof(Dy) << " bytes, dx "
               << sizeof(Dx) << ", " << scaling.name);
  const at::Tensor x = Input<T>(shape, 4);
  const at::Tensor weight = scaling.weighted ? Weight<T>(shape.width) : at::Tensor();
  const at::Tensor dy = Random({shape.rows, shape.width}, 5, ScalarTypeOf<Dy>());
  const at::Tensor residual = Random({shape.rows, shape.width}, 6, ScalarTypeOf<Residual>());
  const auto composite = [&](at::ScalarType type, at::ScalarType result, at::Tensor dweight) {
    at::Tensor dx = RmsNormBackward(type == at::kDouble ? dy.to(type) : dy, x.to(type),
                                    weight.defined() ? weight.to(type) : weight, scaling.rule(),
                                    scaling.weighted ? dweight : at::Tensor());
    if (with_residual) dx.add_(residual);
    return dx.to(result);
  };
  at::Tensor composite_dweight = at::ones({shape.width}, x.options().dtype(at::kFloat));
  at::Tensor exact_dweight = at::ones({shape.width}, x.options().dtype(at::kDouble));
  const at::Tensor composite_dx =
      composite(ScalarTypeOf<T>(), ScalarTypeOf<Dx>(), composite_dweight);
  const at::Tensor exact_dx = composite(at::kDouble, at::kDouble, exact_dweight);

  const RmsNormShape norm_shape{.rows = shape.rows, .width = shape.width};
  const at::Tensor scratch = Unwritten({RmsNormBackwardScratchBytes(norm_shape) / 4}, at::kFloat);
  const auto run = [&](const at::Tensor& dx, const at::Tensor& dweight) {
    RmsNormBackward(norm_shape,
                    RmsNormBackwardArguments<T, Dy, Dx, Residual>{
                        .dy_RH = Data<Dy>(dy),
                        .x_RH = Data<T>(x),
                        .weight_H = Data<T>(weight),
                        .scale = scaling.scale,
                        .epsilon = kEpsilon,
                        .residual_gradient_RH = with_residual ? Data<Residual>(residual) : nullptr,
                        .dx_RH = Data<Dx>(dx),
                        .dweight_H = Data<float>(dweight),
                        .scratch = dweight.defined() ? Data<float>(scratch) : nullptr},
                    nullptr);
  };
  const at::Tensor dx = Unwritten(x.sizes(), ScalarTypeOf<Dx>());
  at::Tensor dweight;
  if (scaling.weighted) dweight = at::ones({shape.width}, x.options().dtype(at::kFloat));
  run(dx, dweight);
  ExpectAsExactAs(composite_dx, dx, exact_dx, "dx");
  if (!scaling.weighted) return;
  ExpectAsExactAs(composite_dweight, dweight, exact_dweight, "dweight");

  const at::Tensor dx_again = Unwritten(x.sizes(), ScalarTypeOf<Dx>());
  const at::Tensor dweight_again = at::ones_like(dweight);
  run(dx_again, dweight_again);
  EXPECT_TRUE(BitEqual(dx, dx_again) && BitEqual(dweight, dweight_again)) << "not repeatable";
  const at::Tensor dx_alone = Unwritten(x.sizes(), ScalarTypeOf<Dx>());
  run(dx_alone, at::Tensor());
  EXPECT_TRUE(BitEqual(dx, dx_alone)) << "depends on whether dweight is wanted";
}

TEST(RmsNormBackwardKernelTest, BackwardIsTheCompositeInEveryCombinationOfTypes) {
  using Narrow = __nv_bfloat16;
  for (const Rows& shape : kRows) {
    for (const bool with_residual : {false, true}) {
      ExpectBackwardIsTheComposite<Narrow, Narrow, Narrow>(shape, with_residual);
      ExpectBackwardIsTheComposite<Narrow, float, Narrow>(shape, with_residual);
      ExpectBackwardIsTheComposite<Narrow, Narrow, float>(shape, with_residual);
      ExpectBackwardIsTheComposite<Narrow, float, float>(shape, with_residual);
      if (shape.width <= 8192) {
        ExpectBackwardIsTheComposite<float, float, float>(shape, with_residual);
      }
    }
    ExpectBackwardIsTheComposite<Narrow, float, Narrow, float>(shape, true);
    ExpectBackwardIsTheComposite<Narrow, float, float, float>(shape, true);
  }
}

TEST(RmsNormBackwardKernelTest, BackwardIsTheCompositeWithEveryScale) {
  using Narrow = __nv_bfloat16;
  for (const Scaling& scaling : kScalings) {
    for (const Rows& shape : kRows) {
      ExpectBackwardIsTheComposite<Narrow, float, Narrow>(shape, true, scaling);
      ExpectBackwardIsTheComposite<Narrow, Narrow, Narrow>(shape, false, scaling);
      if (shape.width <= 8192) {
        ExpectBackwardIsTheComposite<float, float, float>(shape, false, scaling);
      }
    }
  }
}

// dx in place of dy, of x, or of the residual's gradient.
TEST(RmsNormBackwardKernelTest, ResultsMayLieWhereArgumentsWere) {
  using Narrow = __nv_bfloat16;
  for (const Rows& shape : kRows) {
    const at::Tensor x = Input<Narrow>(shape, 1), weight = Weight<Narrow>(shape.width);
    const at::Tensor dy = Random(x.sizes(), 2, at::kFloat),
                     residual = Random(x.sizes(), 3, at::kFloat);
    const auto run = [&]<class Dx>(const at::Tensor& x_RH, const at::Tensor& dy_RH,
                                   const at::Tensor& residual_RH, Dx* dx) {
      RmsNormBackward({.rows = shape.rows, .width = shape.width},
                      RmsNormBackwardArguments<Narrow, float, Dx, float>{
                          .dy_RH = Data<float>(dy_RH),
                          .x_RH = Data<Narrow>(x_RH),
                          .weight_H = Data<Narrow>(weight),
                          .epsilon = kEpsilon,
                          .residual_gradient_RH = Data<float>(residual_RH),
                          .dx_RH = dx},
                      nullptr);
    };
    const at::Tensor wide = at::empty_like(dy), narrow = at::empty_like(x);
    run(x, dy, residual, Data<float>(wide));
    run(x, dy, residual, Data<Narrow>(narrow));
    const at::Tensor x_copy = x.clone(), dy_copy = dy.clone(), residual_copy = residual.clone();
    run(x, dy_copy, residual, Data<float>(dy_copy));
    run(x, dy, residual_copy, Data<float>(residual_copy));
    run(x_copy, dy, residual, Data<Narrow>(x_copy));
    EXPECT_TRUE(BitEqual(dy_copy, wide) && BitEqual(residual_copy, wide)) << shape.width;
    EXPECT_TRUE(BitEqual(x_copy, narrow)) << shape.width;
  }
}

// Goal: offsets beyond 2^31 elements are right.
// Method: a row's result does not depend on how many there are, so the last rows alone must agree.
TEST(RmsNormLargeKernelTest, RowsBehindTwoToThe31ElementsAreRight) {
  using T = __nv_bfloat16;
  const Rows shape{(int64_t{1} << 20) + 300, 2048};
  const at::Tensor few = Random({777, shape.width}, 1, at::kBFloat16);
  const at::Tensor x = few.repeat({shape.rows / 777 + 1, 1}).narrow(0, 0, shape.rows);
  const at::Tensor weight = Weight<T>(shape.width), y = at::empty_like(x);
  RmsNormForward(
      {.rows = shape.rows, .width = shape.width},
      RmsNormForwardArguments<T>{
          .x_RH = Data<T>(x), .weight_H = Data<T>(weight), .epsilon = kEpsilon, .y_RH = Data<T>(y)},
      nullptr);
  const at::Tensor tail = x.narrow(0, shape.rows - 400, 400), y_tail = at::empty_like(tail);
  RmsNormForward({.rows = 400, .width = shape.width},
                 RmsNormForwardArguments<T>{.x_RH = Data<T>(tail),
                                            .weight_H = Data<T>(weight),
                                            .epsilon = kEpsilon,
                                            .y_RH = Data<T>(y_tail)},
                 nullptr);
  EXPECT_TRUE(BitEqual(y.narrow(0, shape.rows - 400, 400), y_tail));
}

}  // namespace
}  // namespace oom::testing
