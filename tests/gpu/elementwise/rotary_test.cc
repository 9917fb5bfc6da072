// Goal: the kernels are RMSNorm by head and rotation as runtime/ops/attention combines them.
// Method: the composite operators on the same CUDA tensors, in the activations' type and in FP64; q
// and k are slices of one projection's output, and their gradients of one gradient.

#include "runtime/kernels/rotary.h"

#include <optional>

#include "runtime/ops/precision.h"
#include "runtime/ops/rms_norm.h"
#include "runtime/ops/rotary.h"
#include "tests/gpu/elementwise/elementwise_testing.h"

namespace oom::testing {
namespace {

RotaryRule Rule(int64_t size, double theta, std::optional<YarnScaling> yarn = std::nullopt) {
  return {.theta = theta, .size = size, .pair_count = size / 2, .yarn = std::move(yarn)};
}

constexpr double kTheta = 1e6;
constexpr float kEpsilon = 1e-6f;
const NormRule kRule = {.epsilon = kEpsilon};

struct Heads {
  int64_t tokens;
  int64_t heads;
  int64_t size;
};
const std::vector<Heads> kHeads = {{0, 4, 128},    {1, 1, 128}, {777, 32, 128},
                                   {2000, 4, 128}, {33, 5, 64}, {50, 3, 256},
                                   {7, 2, 8},      {9, 3, 10},  {3, 200, 128}};

at::Tensor Positions(int64_t tokens, at::ScalarType type) {
  return at::arange(tokens, at::TensorOptions(at::kCUDA).dtype(type)).mul_(7).remainder_(40961);
}

template <class T>
RotaryTable Filled(const at::Tensor& positions, int64_t head_size,
                   const std::optional<YarnScaling>& yarn = std::nullopt) {
  const std::vector<int64_t> shape = {positions.size(0), 1, head_size / 2};
  const RotaryTable table{.cosine = Unwritten(shape, ScalarTypeOf<T>()),
                          .sine = Unwritten(shape, ScalarTypeOf<T>())};
  RotaryTableArguments<T> arguments{.tokens = positions.size(0),
                                    .head_size = head_size,
                                    .theta = kTheta,
                                    .cosine = Data<T>(table.cosine),
                                    .sine = Data<T>(table.sine)};
  if (yarn) {
    const YarnRamp ramp = YarnRampOf(*yarn, head_size, kTheta);
    arguments.factor = static_cast<float>(yarn->factor);
    arguments.ramp_low = static_cast<float>(ramp.low);
    arguments.ramp_width = static_cast<float>(ramp.high - ramp.low);
    arguments.attention_factor = static_cast<float>(yarn->attention_factor);
  }
  if (positions.scalar_type() == at::kInt) {
    FillRotaryTable(arguments, Data<int32_t>(positions), nullptr);
  } else {
    FillRotaryTable(arguments, Data<int64_t>(positions), nullptr);
  }
  return table;
}

RotaryTable Wider(const RotaryTable& table) {
  return {.cosine = table.cosine.to(at::kDouble), .sine = table.sine.to(at::kDouble)};
}

template <class T>
class RotaryKernelTest : public ElementwiseTest<T> {};
TYPED_TEST_SUITE(RotaryKernelTest, ActivationTypes);

TYPED_TEST(RotaryKernelTest, TableIsTheComposite) {
  using T = TypeParam;
  for (const int64_t size : {128, 64, 10}) {
    for (const int64_t tokens : {0, 1, 5000}) {
      const at::Tensor positions = Positions(tokens, at::kLong);
      const RotaryTable expected =
          MakeRotaryTable(positions, Rule(size, kTheta), ScalarTypeOf<T>());
      const RotaryTable table = Filled<T>(positions, size);
      // An angle of 40,000 carries an error of 2^-24 of itself wherever a frequency is rounded
      // otherwise.
      const double bar = sizeof(T) == 2 || size == 10 ? 1e-3 : 1e-7;
      EXPECT_LE(RelativeError(table.cosine, expected.cosine), bar);
      EXPECT_LE(RelativeError(table.sine, expected.sine), bar);
      const RotaryTable narrow = Filled<T>(positions.to(at::kInt), size);
      EXPECT_TRUE(BitEqual(narrow.cosine, table.cosine) && BitEqual(narrow.sine, table.sine));
    }
  }
}

// The bar: an angle of 40,000 carries an error of 2^-24 of itself (see above).
TYPED_TEST(RotaryKernelTest, TableWithYarnIsTheComposite) {
  using T = TypeParam;
  for (const double factor : {2.0, 4.0}) {
    for (const int64_t size : {128, 10}) {
      const YarnScaling yarn = MakeYarn(factor, 32768);
      const at::Tensor positions = Positions(5000, at::kLong);
      const RotaryTable expected =
          MakeRotaryTable(positions, Rule(size, kTheta, yarn), ScalarTypeOf<T>());
      const RotaryTable table = Filled<T>(positions, size, yarn);
      EXPECT_LE(RelativeError(table.cosine, expected.cosine), 1e-3);
      EXPECT_LE(RelativeError(table.sine, expected.sine), 1e-3);
      const RotaryTable plain = Filled<T>(positions, size);
      EXPECT_GT(RelativeError(plain.cosine, expected.cosine), 1e-2);
    }
  }
}

// x lies in the middle of rows that hold other columns before and behind.
struct Slice {
  Slice(const Heads& shape, at::ScalarType type, uint64_t seed)
      : rows(Random({shape.tokens, 8 + shape.heads * shape.size + 16}, seed, type)),
        part(rows.narrow(1, 8, shape.heads * shape.size).unflatten(1, {shape.heads, shape.size})) {}
  at::Tensor rows;
  at::Tensor part;
};

template <class T>
void ExpectForwardIsTheComposite(const Heads& shape, bool with_norm) {
  SCOPED_TRACE(::testing::Message() << shape.tokens << " tokens, " << shape.heads << " heads of "
                                    << shape.size << (with_norm ? ", norm" : ""));
  const Slice x(shape, ScalarTypeOf<T>(), 1);
  const at::Tensor norm = Random({shape.size}, 2).mul_(0.2).add_(1).to(ScalarTypeOf<T>());
  const RotaryTable table = Filled<T>(Positions(shape.tokens, at::kLong), shape.size);
  const at::Tensor y = Unwritten(x.part.sizes(), ScalarTypeOf<T>());
  NormRotaryForward({.tokens = shape.tokens, .heads = shape.heads, .head_size = shape.size},
                    NormRotaryForwardArguments<T>{.x_TNd = Data<T>(x.part),
                                                  .x_token_stride = x.rows.size(1),
                                                  .norm_d = with_norm ? Data<T>(norm) : nullptr,
                                                  .epsilon = kEpsilon,
                                                  .cosine = Data<T>(table.cosine),
                                                  .sine = Data<T>(table.sine),
                                                  .y_TNd = Data<T>(y),
                                                  .y_token_stride = shape.heads * shape.size},
                    nullptr);
  const at::Tensor input = x.part.contiguous();
  if (!with_norm) {
    EXPECT_TRUE(BitEqual(y, RotaryForward(input, table)));
    return;
  }
  ExpectAsExactAs(
      RotaryForward(RmsNormForward(input, norm, kRule), table), y,
      RotaryForward(RmsNormForward(input.to(at::kDouble), norm.to(at::kDouble), kRule),
                    Wider(table)),
      "y");
}

TYPED_TEST(RotaryKernelTest, ForwardOfASliceIsTheComposite) {
  for (const Heads& shape : kHeads) {
    ExpectForwardIsTheComposite<TypeParam>(shape, false);
    ExpectForwardIsTheComposite<TypeParam>(shape, true);
  }
}

template <class T>
void ExpectBackwardIsTheComposite(const Heads& shape, bool with_norm) {
  SCOPED_TRACE(::testing::Message() << shape.tokens << " tokens, " << shape.heads << " heads of "
                                    << shape.size << (with_norm ? ", norm" : ""));
  const at::ScalarType type = ScalarTypeOf<T>();
  const Slice x(shape, type, 3);
  const at::Tensor norm = Random({shape.size}, 4).mul_(0.2).add_(1).to(type);
  const at::Tensor dy = Random(x.part.sizes(), 5, type);
  const RotaryTable table = Filled<T>(Positions(shape.tokens, at::kLong), shape.size);
  const RotaryShape kernel_shape{
      .tokens = shape.tokens, .heads = shape.heads, .head_size = shape.size};
  const at::Tensor scratch =
      Unwritten({NormRotaryBackwardScratchBytes(kernel_shape) / 4}, at::kFloat);
  const auto run = [&](const Slice& dx, const at::Tensor& dnorm) {
    NormRotaryBackward(
        kernel_shape,
        NormRotaryBackwardArguments<T>{.dy_TNd = Data<T>(dy),
                                       .dy_token_stride = shape.heads * shape.size,
                                       .x_TNd = Data<T>(x.part),
                                       .x_token_stride = x.rows.size(1),
                                       .norm_d = with_norm ? Data<T>(norm) : nullptr,
                                       .epsilon = kEpsilon,
                                       .cosine = Data<T>(table.cosine),
                                       .sine = Data<T>(table.sine),
                                       .dx_TNd = Data<T>(dx.part),
                                       .dx_token_stride = dx.rows.size(1),
                                       .dnorm_d = Data<float>(dnorm),
                                       .scratch = dnorm.defined() ? Data<float>(scratch) : nullptr},
        nullptr);
  };
  const at::TensorOptions wide = x.rows.options().dtype(at::kFloat);
  const Slice dx(shape, type, 6);
  const at::Tensor before = dx.rows.clone(), dnorm = at::ones({shape.size}, wide);
  run(dx, dnorm);
  const int64_t behind = 8 + shape.heads * shape.size;
  EXPECT_TRUE(BitEqual(dx.rows.narrow(1, 0, 8), before.narrow(1, 0, 8)) &&
              BitEqual(dx.rows.narrow(1, behind, 16), before.narrow(1, behind, 16)))
      << "wrote beside its columns";

  const at::Tensor drotated = RotaryBackward(dy, table);
  if (!with_norm) {
    EXPECT_TRUE(BitEqual(dx.part.contiguous(), drotated));
    return;
  }
  const at::Tensor input = x.part.contiguous();
  at::Tensor composite_dnorm = at::ones({shape.size}, wide);
  at::Tensor exact_dnorm = at::ones({shape.size}, wide.dtype(at::kDouble));
  const at::Tensor composite_dx =
      RmsNormBackward(drotated, input, norm, kRule, composite_dnorm).to(type);
  const at::Tensor exact_dx =
      RmsNormBackward(RotaryBackward(dy.to(at::kDouble), Wider(table)), input.to(at::kDouble),
                      norm.to(at::kDouble), kRule, exact_dnorm);
  ExpectAsExactAs(composite_dx, dx.part, exact_dx, "dx");
  ExpectAsExactAs(composite_dnorm, dnorm, exact_dnorm, "dnorm");

  const Slice dx_again(shape, type, 6), dx_alone(shape, type, 6);
  const at::Tensor dnorm_again = at::ones({shape.size}, wide);
  run(dx_again, dnorm_again);
  EXPECT_TRUE(BitEqual(dx.rows, dx_again.rows) && BitEqual(dnorm, dnorm_again)) << "not repeatable";
  run(dx_alone, at::Tensor());
  EXPECT_TRUE(BitEqual(dx.rows, dx_alone.rows)) << "depends on whether dnorm is wanted";
}

TYPED_TEST(RotaryKernelTest, BackwardIntoASliceIsTheComposite) {
  for (const Heads& shape : kHeads) {
    ExpectBackwardIsTheComposite<TypeParam>(shape, false);
    ExpectBackwardIsTheComposite<TypeParam>(shape, true);
  }
}

}  // namespace
}  // namespace oom::testing
