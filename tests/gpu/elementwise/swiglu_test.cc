// Goal: the kernels are runtime/ops/swiglu, and its use in runtime/ops/experts.
// Method: the composite operators on the same CUDA tensors, in the activations' type and in FP64.

#include "runtime/kernels/swiglu.h"

#include "runtime/ops/precision.h"
#include "runtime/ops/swiglu.h"
#include "tests/gpu/elementwise/elementwise_testing.h"

namespace oom::testing {
namespace {

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGeluTanh};

const char* NameOf(Activation activation) {
  return activation == Activation::kSilu ? "SiLU" : "GELU";
}

struct Rows {
  int64_t rows;
  int64_t width;
};
const std::vector<Rows> kRows = {{0, 768},  {1, 768},    {1001, 768}, {5, 6},      {9, 7},
                                 {33, 100}, {70, 14336}, {3, 33},     {130, 2048}, {4097, 64}};

template <class T>
at::Tensor GateUp(const Rows& shape, uint64_t seed) {
  at::Tensor gate_up = Random({shape.rows, 2 * shape.width}, seed).mul_(3);
  // Far out on both sides, where exponentials overflow and vanish.
  gate_up.narrow(1, 0, 2).mul_(60);
  return gate_up.to(ScalarTypeOf<T>());
}

template <class T>
class SwigluKernelTest : public ElementwiseTest<T> {};
TYPED_TEST_SUITE(SwigluKernelTest, ActivationTypes);

TYPED_TEST(SwigluKernelTest, ForwardIsTheComposite) {
  using T = TypeParam;
  for (const Rows& shape : kRows) {
    const at::Tensor gate_up = GateUp<T>(shape, 1);
    for (const Activation activation : kActivations) {
      const at::Tensor y = Unwritten({shape.rows, shape.width}, ScalarTypeOf<T>());
      SwigluForward(SwigluShape{.rows = shape.rows, .width = shape.width, .activation = activation},
                    Data<const T>(gate_up), Data<T>(y), nullptr);
      ExpectAsExactAs(SwigluForward(gate_up, activation), y,
                      SwigluForward(gate_up.to(at::kDouble), activation),
                      "y of width " + std::to_string(shape.width) + ", " + NameOf(activation));
    }
  }
}

struct Gradients {
  at::Tensor gate_up, weighted, dweight;
};

// As runtime/ops/experts does it; `weighted` is rounded to `type`.
Gradients Composite(const at::Tensor& da, const at::Tensor& gate_up, const at::Tensor& weight_R,
                    Activation activation, at::ScalarType type) {
  const at::Tensor weight_R1 = weight_R.to(WideType(type)).unsqueeze(1);
  at::Tensor activated = Wide(SwigluForward(gate_up.to(type), activation));
  at::Tensor dactivated = da.to(type, /*non_blocking=*/false, /*copy=*/true);
  Gradients result;
  result.dweight = at::mul(activated, dactivated).sum(1);
  result.weighted = activated.mul_(weight_R1).to(type);
  result.gate_up = SwigluBackward(dactivated.mul_(weight_R1), gate_up.to(type), activation);
  return result;
}

template <class T>
void ExpectBackwardIsTheComposite(const Rows& shape, bool weighted, Activation activation) {
  SCOPED_TRACE(::testing::Message() << NameOf(activation) << ", " << shape.rows << " rows of "
                                    << shape.width << (weighted ? ", weighted" : ""));
  const at::ScalarType type = ScalarTypeOf<T>();
  const at::Tensor gate_up = GateUp<T>(shape, 2);
  const at::Tensor da = Random({shape.rows, shape.width}, 3, type);
  const at::Tensor weight = weighted ? Random({shape.rows}, 4).abs_().to(at::kFloat)
                                     : at::ones({shape.rows}, da.options().dtype(at::kFloat));
  const Gradients composite = Composite(da, gate_up, weight, activation, type);
  const Gradients exact = Composite(da, gate_up, weight, activation, at::kDouble);

  const Gradients actual = {.gate_up = Unwritten(gate_up.sizes(), type),
                            .weighted = Unwritten(da.sizes(), type),
                            .dweight = Unwritten({shape.rows}, at::kFloat)};
  const SwigluShape kernel_shape{
      .rows = shape.rows, .width = shape.width, .activation = activation};
  SwigluBackward(kernel_shape,
                 SwigluBackwardArguments<T>{.da_RI = Data<T>(da),
                                            .gate_up_RF = Data<T>(gate_up),
                                            .weight_R = weighted ? Data<float>(weight) : nullptr,
                                            .dgate_up_RF = Data<T>(actual.gate_up),
                                            .weighted_RI = Data<T>(actual.weighted),
                                            .dweight_R = Data<float>(actual.dweight)},
                 nullptr);
  ExpectAsExactAs(composite.gate_up, actual.gate_up, exact.gate_up, "dgate_up");
  ExpectAsExactAs(composite.weighted, actual.weighted, exact.weighted, "weighted");
  ExpectAsExactAs(composite.dweight, actual.dweight, exact.dweight, "dweight");

  // In place of its inputs, and with nothing else wanted.
  const at::Tensor gate_up_copy = gate_up.clone(), da_copy = da.clone();
  SwigluBackward(kernel_shape,
                 SwigluBackwardArguments<T>{.da_RI = Data<T>(da_copy),
                                            .gate_up_RF = Data<T>(gate_up_copy),
                                            .weight_R = weighted ? Data<float>(weight) : nullptr,
                                            .dgate_up_RF = Data<T>(gate_up_copy),
                                            .weighted_RI = Data<T>(da_copy)},
                 nullptr);
  EXPECT_TRUE(BitEqual(gate_up_copy, actual.gate_up) && BitEqual(da_copy, actual.weighted));
  const at::Tensor alone = Unwritten(gate_up.sizes(), type);
  SwigluBackward(kernel_shape,
                 SwigluBackwardArguments<T>{.da_RI = Data<T>(da),
                                            .gate_up_RF = Data<T>(gate_up),
                                            .weight_R = weighted ? Data<float>(weight) : nullptr,
                                            .dgate_up_RF = Data<T>(alone)},
                 nullptr);
  EXPECT_TRUE(BitEqual(alone, actual.gate_up));
}

TYPED_TEST(SwigluKernelTest, BackwardIsTheComposite) {
  for (const Rows& shape : kRows) {
    for (const Activation activation : kActivations) {
      ExpectBackwardIsTheComposite<TypeParam>(shape, false, activation);
      ExpectBackwardIsTheComposite<TypeParam>(shape, true, activation);
    }
  }
}

// Goal: offsets beyond 2^31 elements are right. Method: the last rows alone must agree.
TEST(SwigluLargeKernelTest, RowsBehindTwoToThe31ElementsAreRight) {
  using T = __nv_bfloat16;
  const Rows shape{1400000, 768};
  const at::Tensor few = GateUp<T>({1000, shape.width}, 1);
  const at::Tensor gate_up = few.repeat({shape.rows / 1000, 1});
  const at::Tensor y = at::empty({shape.rows, shape.width}, few.options());
  SwigluForward(SwigluShape{.rows = shape.rows, .width = shape.width}, Data<const T>(gate_up),
                Data<T>(y), nullptr);
  const at::Tensor y_few = at::empty({1000, shape.width}, few.options());
  SwigluForward(SwigluShape{.rows = 1000, .width = shape.width}, Data<const T>(few), Data<T>(y_few),
                nullptr);
  EXPECT_TRUE(BitEqual(y.narrow(0, shape.rows - 1000, 1000), y_few));
}

}  // namespace
}  // namespace oom::testing
