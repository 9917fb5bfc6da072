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

constexpr double kTheta = 1e6;
constexpr float kEpsilon = 1e-6f;

RotaryRule Rule(int64_t size, std::optional<YarnScaling> yarn = std::nullopt,
                int64_t pair_count = 0) {
  return {.theta = kTheta,
          .size = size,
          .pair_count = pair_count > 0 ? pair_count : size / 2,
          .yarn = std::move(yarn)};
}

struct Heads {
  int64_t tokens;
  int64_t heads;
  int64_t size;
  int64_t rotary_size;
  int64_t stride;  // From head to head.

  RotaryShape shape() const {
    return {.tokens = tokens, .heads = heads, .head_size = size, .rotary_size = rotary_size};
  }
};
Heads Whole(int64_t tokens, int64_t heads, int64_t size) {
  return {tokens, heads, size, size, size};
}
const std::vector<Heads> kHeads = {
    Whole(0, 4, 128), Whole(1, 1, 128), Whole(777, 32, 128), Whole(2000, 4, 128), Whole(33, 5, 64),
    Whole(50, 3, 256), Whole(7, 2, 8), Whole(9, 3, 10), Whole(3, 200, 128),
    // A part turns: in vectors, by element. Heads with something beside them.
    {777, 16, 256, 64, 512}, {2000, 2, 256, 64, 256}, {33, 3, 128, 32, 128}, {5, 2, 64, 16, 128},
    {70, 5, 128, 128, 256}, {21, 3, 32, 8, 64}, {9, 3, 10, 6, 13}, {40, 4, 256, 100, 260}};
// With BF16 alone.
const std::vector<Heads> kWideHeads = {Whole(130, 3, 512), {77, 2, 512, 128, 1024}};

template <class T>
std::vector<Heads> HeadsOf() {
  std::vector<Heads> heads = kHeads;
  if (sizeof(T) == 2) heads.insert(heads.end(), kWideHeads.begin(), kWideHeads.end());
  return heads;
}

struct Norm {
  std::string name;
  std::optional<NormScale> scale;  // None: no norm.

  NormRule rule() const { return {.epsilon = kEpsilon, .scale = *scale}; }
};
const std::vector<Norm> kNorms = {{"no norm", std::nullopt},
                                  {"norm, w after rounding", NormScale::kWeightAfterRounding},
                                  {"norm, w", NormScale::kWeight},
                                  {"norm, 1 + w", NormScale::kOnePlusWeight}};

at::Tensor Positions(int64_t tokens, at::ScalarType type) {
  return at::arange(tokens, at::TensorOptions(at::kCUDA).dtype(type)).mul_(7).remainder_(40961);
}

template <class T>
RotaryTable Filled(const at::Tensor& positions, const RotaryRule& rule) {
  const std::vector<int64_t> shape = {positions.size(0), 1, rule.size / 2};
  const RotaryTable table{.cosine = Unwritten(shape, ScalarTypeOf<T>()),
                          .sine = Unwritten(shape, ScalarTypeOf<T>())};
  RotaryTableArguments<T> arguments{.tokens = positions.size(0),
                                    .rotary_size = rule.size,
                                    .pair_count = rule.pair_count,
                                    .theta = rule.theta,
                                    .cosine = Data<T>(table.cosine),
                                    .sine = Data<T>(table.sine)};
  if (rule.yarn) {
    const YarnRamp ramp = YarnRampOf(*rule.yarn, rule.size, rule.theta);
    arguments.factor = static_cast<float>(rule.yarn->factor);
    arguments.ramp_low = static_cast<float>(ramp.low);
    arguments.ramp_width = static_cast<float>(ramp.high - ramp.low);
    arguments.attention_factor = static_cast<float>(rule.yarn->attention_factor);
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
          MakeRotaryTable(positions, Rule(size), ScalarTypeOf<T>());
      const RotaryTable table = Filled<T>(positions, Rule(size));
      // An angle of 40,000 carries an error of 2^-24 of itself wherever a frequency is rounded
      // otherwise.
      const double bar = sizeof(T) == 2 || size == 10 ? 1e-3 : 1e-7;
      EXPECT_LE(RelativeError(table.cosine, expected.cosine), bar);
      EXPECT_LE(RelativeError(table.sine, expected.sine), bar);
      const RotaryTable narrow = Filled<T>(positions.to(at::kInt), Rule(size));
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
          MakeRotaryTable(positions, Rule(size, yarn), ScalarTypeOf<T>());
      const RotaryTable table = Filled<T>(positions, Rule(size, yarn));
      EXPECT_LE(RelativeError(table.cosine, expected.cosine), 1e-3);
      EXPECT_LE(RelativeError(table.sine, expected.sine), 1e-3);
      const RotaryTable plain = Filled<T>(positions, Rule(size));
      EXPECT_GT(RelativeError(plain.cosine, expected.cosine), 1e-2);
    }
  }
}

TYPED_TEST(RotaryKernelTest, TableOfFewPairsLeavesTheOthers) {
  using T = TypeParam;
  const RotaryRule rule = Rule(512, std::nullopt, 64);
  const at::Tensor positions = Positions(3000, at::kLong);
  const RotaryTable expected = MakeRotaryTable(positions, rule, ScalarTypeOf<T>());
  const RotaryTable table = Filled<T>(positions, rule);
  EXPECT_LE(RelativeError(table.cosine, expected.cosine), 1e-3);
  EXPECT_LE(RelativeError(table.sine, expected.sine), 1e-3);
  EXPECT_TRUE(table.cosine.narrow(2, 64, 192).eq(1).all().template item<bool>());
  EXPECT_TRUE(table.sine.narrow(2, 64, 192).eq(0).all().template item<bool>());
}

// x lies in the middle of rows that hold other columns before and behind, and between heads.
struct Slice {
  Slice(const Heads& shape, at::ScalarType type, uint64_t seed)
      : rows(Random({shape.tokens, 8 + shape.heads * shape.stride + 16}, seed, type)),
        part(PartOf(rows, shape)) {}

  static at::Tensor PartOf(const at::Tensor& rows, const Heads& shape) {
    return rows.narrow(1, 8, shape.heads * shape.stride)
        .unflatten(1, {shape.heads, shape.stride})
        .narrow(2, 0, shape.size);
  }

  at::Tensor rows;
  at::Tensor part;
};

template <class T>
at::Tensor NormWeight(const Heads& shape, const Norm& norm, uint64_t seed) {
  if (!norm.scale) return {};
  return Random({shape.size}, seed).mul_(0.2).add_(1).to(ScalarTypeOf<T>());
}

std::string NameOf(const Heads& shape, const Norm& norm) {
  return std::to_string(shape.tokens) + " tokens, " + std::to_string(shape.heads) + " heads of " +
         std::to_string(shape.size) + ", " + std::to_string(shape.rotary_size) + " turn, " +
         norm.name;
}

template <class T>
void ExpectForwardIsTheComposite(const Heads& shape, const Norm& norm) {
  SCOPED_TRACE(NameOf(shape, norm));
  const Slice x(shape, ScalarTypeOf<T>(), 1);
  const at::Tensor weight = NormWeight<T>(shape, norm, 2);
  const RotaryTable table =
      Filled<T>(Positions(shape.tokens, at::kLong), Rule(shape.rotary_size));
  const at::Tensor y = Unwritten(x.part.sizes(), ScalarTypeOf<T>());
  NormRotaryForward(
      shape.shape(),
      NormRotaryForwardArguments<T>{
          .x_TNd = Data<T>(x.part),
          .x_token_stride = x.rows.size(1),
          .x_head_stride = shape.stride,
          .norm_d = Data<T>(weight),
          .scale = norm.scale.value_or(NormScale::kWeight),
          .epsilon = kEpsilon,
          .cosine = Data<T>(table.cosine),
          .sine = Data<T>(table.sine),
          .y_TNd = Data<T>(y),
          .y_token_stride = shape.heads * shape.size},
      nullptr);
  const at::Tensor input = x.part.contiguous();
  if (!norm.scale) {
    EXPECT_TRUE(BitEqual(y, RotaryForward(input, table)));
    return;
  }
  const NormRule rule = norm.rule();
  ExpectAsExactAs(
      RotaryForward(RmsNormForward(input, weight, rule), table), y,
      RotaryForward(RmsNormForward(input.to(at::kDouble), weight.to(at::kDouble), rule),
                    Wider(table)),
      "y");
}

TYPED_TEST(RotaryKernelTest, ForwardOfASliceIsTheComposite) {
  for (const Heads& shape : HeadsOf<TypeParam>()) {
    for (const Norm& norm : kNorms) ExpectForwardIsTheComposite<TypeParam>(shape, norm);
  }
}

template <class T>
void ExpectBackwardIsTheComposite(const Heads& shape, const Norm& norm) {
  SCOPED_TRACE(NameOf(shape, norm));
  const at::ScalarType type = ScalarTypeOf<T>();
  const Slice x(shape, type, 3);
  const at::Tensor weight = NormWeight<T>(shape, norm, 4);
  const at::Tensor dy = Random(x.part.sizes(), 5, type);
  const RotaryTable table =
      Filled<T>(Positions(shape.tokens, at::kLong), Rule(shape.rotary_size));
  const at::Tensor scratch =
      Unwritten({NormRotaryBackwardScratchBytes(shape.shape()) / 4}, at::kFloat);
  const auto run = [&](const Slice& dx, const at::Tensor& dnorm) {
    NormRotaryBackward(
        shape.shape(),
        NormRotaryBackwardArguments<T>{.dy_TNd = Data<T>(dy),
                                       .dy_token_stride = shape.heads * shape.size,
                                       .x_TNd = Data<T>(x.part),
                                       .x_token_stride = x.rows.size(1),
                                       .x_head_stride = shape.stride,
                                       .norm_d = Data<T>(weight),
                                       .scale = norm.scale.value_or(NormScale::kWeight),
                                       .epsilon = kEpsilon,
                                       .cosine = Data<T>(table.cosine),
                                       .sine = Data<T>(table.sine),
                                       .dx_TNd = Data<T>(dx.part),
                                       .dx_token_stride = dx.rows.size(1),
                                       .dx_head_stride = shape.stride,
                                       .dnorm_d = Data<float>(dnorm),
                                       .scratch = dnorm.defined() ? Data<float>(scratch) : nullptr},
        nullptr);
  };
  const at::TensorOptions wide = x.rows.options().dtype(at::kFloat);
  const Slice dx(shape, type, 6);
  const at::Tensor expected_rows = dx.rows.clone(), dnorm = at::ones({shape.size}, wide);
  run(dx, dnorm);
  Slice::PartOf(expected_rows, shape).copy_(dx.part);
  EXPECT_TRUE(BitEqual(dx.rows, expected_rows)) << "wrote beside its columns";

  const at::Tensor drotated = RotaryBackward(dy, table);
  if (!norm.scale) {
    EXPECT_TRUE(BitEqual(dx.part.contiguous(), drotated));
    return;
  }
  const NormRule rule = norm.rule();
  const at::Tensor input = x.part.contiguous();
  at::Tensor composite_dnorm = at::ones({shape.size}, wide);
  at::Tensor exact_dnorm = at::ones({shape.size}, wide.dtype(at::kDouble));
  const at::Tensor composite_dx =
      RmsNormBackward(drotated, input, weight, rule, composite_dnorm).to(type);
  const at::Tensor exact_dx =
      RmsNormBackward(RotaryBackward(dy.to(at::kDouble), Wider(table)), input.to(at::kDouble),
                      weight.to(at::kDouble), rule, exact_dnorm);
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
  for (const Heads& shape : HeadsOf<TypeParam>()) {
    for (const Norm& norm : kNorms) ExpectBackwardIsTheComposite<TypeParam>(shape, norm);
  }
}

}  // namespace
}  // namespace oom::testing
