// Goal: losses and gradients are those of runtime/ops/head_loss, for every way a row is kept.
// Method: the same composite on the same CUDA tensors, with FP32 softmax and in FP64.

#include "runtime/kernels/cross_entropy.h"

#include "tests/gpu/elementwise/elementwise_testing.h"

namespace oom::testing {
namespace {

constexpr double kScale = 1.0 / 777;

struct Loss {
  at::Tensor by_token;
  at::Tensor dlogits_TV;
};

// `cap` 0: none.
Loss Composite(const at::Tensor& logits_TV, const at::Tensor& target_T, at::ScalarType wide,
               double cap = 0.0) {
  at::Tensor share;  // z / C
  if (cap != 0.0) share = at::div(logits_TV.to(wide), cap).tanh_();
  at::Tensor log_probability =
      at::log_softmax(share.defined() ? at::mul(share, cap) : logits_TV, 1, wide);
  const at::Tensor valid_T1 = target_T.ge(0).unsqueeze(1);
  const at::Tensor index_T1 = target_T.clamp_min(0).unsqueeze(1);
  Loss loss;
  loss.by_token = log_probability.gather(1, index_T1)
                      .masked_fill_(valid_T1.logical_not(), 0.0)
                      .neg_()
                      .squeeze(1);
  const at::Tensor scale_T1 = valid_T1.to(wide).mul_(kScale);
  loss.dlogits_TV = log_probability.exp_().mul_(scale_T1);
  loss.dlogits_TV.scatter_add_(1, index_T1, at::neg(scale_T1));
  if (share.defined()) loss.dlogits_TV.mul_(share.square_().neg_().add_(1.0));
  return loss;
}

at::Tensor Targets(int64_t tokens, int64_t vocabulary) {
  at::Tensor target = Random({tokens}, 9).mul_(1e6).to(at::kLong).abs_().remainder_(vocabulary);
  for (int64_t token = 0; token < tokens; token += 5) target[token] = -1;
  if (tokens > 3) {
    target[1] = 0;
    target[2] = vocabulary - 1;
  }
  return target;
}

template <class T>
class CrossEntropyKernelTest : public ElementwiseTest<T> {};
TYPED_TEST_SUITE(CrossEntropyKernelTest, ActivationTypes);

template <class T>
void ExpectTheComposite(int64_t tokens, int64_t vocabulary, double cap = 0.0) {
  SCOPED_TRACE(::testing::Message()
               << tokens << " tokens, vocabulary " << vocabulary << ", cap " << cap);
  const at::ScalarType type = ScalarTypeOf<T>();
  // Some rows flat, some with one clear winner, some far from zero.
  at::Tensor logits = Random({tokens, vocabulary}, 1).mul_(4);
  if (tokens > 3) {
    logits[1].mul_(10);
    logits[2].add_(300);
    logits[3].sub_(300);
  }
  logits = logits.to(type);
  const at::Tensor target = Targets(tokens, vocabulary);
  const Loss exact = Composite(logits.to(at::kDouble), target, at::kDouble, cap);
  const Loss composite = Composite(logits, target, at::kFloat, cap);

  const CrossEntropyShape shape{
      .tokens = tokens, .vocabulary = vocabulary, .logit_cap = static_cast<float>(cap)};
  const at::Tensor before = logits.clone();
  const at::Tensor evaluated = Unwritten({tokens}, at::kFloat);
  CrossEntropyLoss(shape, Data<const T>(logits), Data<int64_t>(target), Data<float>(evaluated),
                   nullptr);
  EXPECT_TRUE(BitEqual(logits, before)) << "evaluation wrote to the logits";
  const at::Tensor loss = Unwritten({tokens}, at::kFloat);
  CrossEntropyInPlace(shape, Data<T>(logits), Data<int64_t>(target), kScale, Data<float>(loss),
                      nullptr);
  EXPECT_TRUE(BitEqual(evaluated, loss)) << "evaluation gives another loss";
  ExpectAsExactAs(composite.by_token, loss, exact.by_token, "loss");
  ExpectAsExactAs(composite.dlogits_TV.to(type), logits, exact.dlogits_TV, "dlogits");
  const at::Tensor ignored = target.lt(0);
  EXPECT_EQ(logits.index({ignored}).count_nonzero().template item<int64_t>(), 0);
  EXPECT_EQ(loss.index({ignored}).count_nonzero().template item<int64_t>(), 0);

  const at::Tensor again = before.clone();
  CrossEntropyInPlace(shape, Data<T>(again), Data<int64_t>(target), kScale, Data<float>(evaluated),
                      nullptr);
  EXPECT_TRUE(BitEqual(again, logits) && BitEqual(evaluated, loss)) << "not repeatable";
}

TYPED_TEST(CrossEntropyKernelTest, LossAndGradientAreTheComposite) {
  for (const int64_t vocabulary : {8, 31, 37, 1000, 8192, 20480, 20488, 32000, 50257, 81920, 151936,
                                   163848, 262144, 300000, 530000, 1000000}) {
    for (const int64_t tokens : {0, 1, 19}) ExpectTheComposite<TypeParam>(tokens, vocabulary);
  }
}

// Gemma 4's cap, and one that most logits are near.
TYPED_TEST(CrossEntropyKernelTest, LossAndGradientOfCappedLogitsAreTheComposite) {
  for (const int64_t vocabulary : {8, 37, 1000, 8192, 20480, 50257, 163848, 262144, 530000}) {
    for (const double cap : {30.0, 2.0}) {
      for (const int64_t tokens : {1, 19}) ExpectTheComposite<TypeParam>(tokens, vocabulary, cap);
    }
  }
  ExpectTheComposite<TypeParam>(150, 262144, 30.0);
}

TYPED_TEST(CrossEntropyKernelTest, CappedLogitsThatAreInfiniteAreTheCap) {
  using T = TypeParam;
  constexpr double kCap = 5.0, kInfinity = std::numeric_limits<double>::infinity();
  for (const int64_t vocabulary : {1000, 40000, 40001}) {
    at::Tensor logits = Random({3, vocabulary}, 4, ScalarTypeOf<T>());
    logits[0][7] = kInfinity;
    logits[1][vocabulary - 1] = -kInfinity;
    logits[2][5] = std::numeric_limits<double>::quiet_NaN();
    const at::Tensor target = at::full({3}, 7, at::TensorOptions(at::kCUDA).dtype(at::kLong));
    const Loss exact = Composite(logits.to(at::kDouble), target, at::kDouble, kCap);
    const Loss composite = Composite(logits, target, at::kFloat, kCap);
    const at::Tensor loss = Unwritten({3}, at::kFloat);
    CrossEntropyInPlace({.tokens = 3, .vocabulary = vocabulary, .logit_cap = kCap}, Data<T>(logits),
                        Data<int64_t>(target), kScale, Data<float>(loss), nullptr);
    EXPECT_TRUE(loss.isnan()[2].template item<bool>());
    const auto finite = [](const at::Tensor& x) { return x.narrow(0, 0, 2); };
    ExpectAsExactAs(finite(composite.by_token), finite(loss), finite(exact.by_token), "loss");
    ExpectAsExactAs(finite(composite.dlogits_TV).to(ScalarTypeOf<T>()), finite(logits),
                    finite(exact.dlogits_TV), "dlogits");
  }
}

// Many more rows than run at once.
TYPED_TEST(CrossEntropyKernelTest, LossAndGradientAreTheCompositeForManyRows) {
  ExpectTheComposite<TypeParam>(4000, 1000);
  ExpectTheComposite<TypeParam>(900, 32000);
  ExpectTheComposite<TypeParam>(300, 151936);
  ExpectTheComposite<TypeParam>(150, 262144);
}

TYPED_TEST(CrossEntropyKernelTest, MinusInfinityIsProbabilityZero) {
  using T = TypeParam;
  for (const int64_t vocabulary : {40000, 40001}) {
    at::Tensor logits = Random({2, vocabulary}, 2, ScalarTypeOf<T>());
    // Whole threads, whole blocks and single values.
    logits.narrow(1, 100, 30000).fill_(-std::numeric_limits<double>::infinity());
    const at::Tensor target = at::full({2}, 7, at::TensorOptions(at::kCUDA).dtype(at::kLong));
    const Loss exact = Composite(logits.to(at::kDouble), target, at::kDouble);
    const Loss composite = Composite(logits, target, at::kFloat);
    const at::Tensor loss = Unwritten({2}, at::kFloat);
    CrossEntropyInPlace({.tokens = 2, .vocabulary = vocabulary}, Data<T>(logits),
                        Data<int64_t>(target), kScale, Data<float>(loss), nullptr);
    ExpectAsExactAs(composite.by_token, loss, exact.by_token, "loss");
    ExpectAsExactAs(composite.dlogits_TV.to(ScalarTypeOf<T>()), logits, exact.dlogits_TV,
                    "dlogits");
    EXPECT_EQ(logits.narrow(1, 100, 30000).count_nonzero().template item<int64_t>(), 0);
  }
}

TYPED_TEST(CrossEntropyKernelTest, NanShowsInTheLoss) {
  using T = TypeParam;
  for (const int64_t vocabulary : {1000, 40000, 40001}) {
    at::Tensor logits = Random({3, vocabulary}, 3, ScalarTypeOf<T>());
    logits[0][5] = std::numeric_limits<double>::quiet_NaN();
    logits[1][vocabulary - 1] = std::numeric_limits<double>::infinity();
    const at::Tensor target = at::full({3}, 7, at::TensorOptions(at::kCUDA).dtype(at::kLong));
    const at::Tensor loss = at::zeros({3}, at::TensorOptions(at::kCUDA).dtype(at::kFloat));
    CrossEntropyInPlace({.tokens = 3, .vocabulary = vocabulary}, Data<T>(logits),
                        Data<int64_t>(target), kScale, Data<float>(loss), nullptr);
    EXPECT_TRUE(loss.isnan()[0].template item<bool>());
    EXPECT_FALSE(loss.isfinite()[1].template item<bool>());
    EXPECT_TRUE(loss.isfinite()[2].template item<bool>());
  }
}

TEST(SumLossesTest, SumIsInFp64AndContinuesWhatIsThere) {
  for (const int64_t tokens : {0, 1, 1023, 1024, 33333}) {
    const at::Tensor target = Targets(tokens, 1000);
    const at::Tensor loss =
        at::abs(Random({tokens}, 5, at::kFloat)).masked_fill_(target.lt(0), 0.0);
    const at::Tensor sum = at::full({1}, 0.5, loss.options().dtype(at::kDouble));
    const at::Tensor valid = at::full({1}, 3, target.options());
    SumLosses(tokens, Data<float>(loss), Data<int64_t>(target), Data<double>(sum),
              Data<int64_t>(valid), nullptr);
    EXPECT_EQ(valid.item<int64_t>(), 3 + target.ge(0).sum().item<int64_t>());
    const double expected = 0.5 + loss.sum(at::kDouble).item<double>();
    EXPECT_NEAR(sum.item<double>(), expected, 1e-12 * expected);
  }
}

// Goal: offsets beyond 2^31 elements are right. Method: the last rows alone must agree.
TEST(CrossEntropyLargeKernelTest, RowsBehindTwoToThe31ElementsAreRight) {
  using T = __nv_bfloat16;
  constexpr int64_t kVocabulary = 151936, kFew = 100, kTokens = 14500;
  const at::Tensor few = Random({kFew, kVocabulary}, 1, at::kBFloat16);
  const at::Tensor logits = few.repeat({kTokens / kFew, 1});
  const at::Tensor target = Targets(kTokens, kVocabulary);
  const at::Tensor loss = Unwritten({kTokens}, at::kFloat),
                   few_loss = Unwritten({kFew}, at::kFloat);
  CrossEntropyInPlace({.tokens = kTokens, .vocabulary = kVocabulary}, Data<T>(logits),
                      Data<int64_t>(target), kScale, Data<float>(loss), nullptr);
  const at::Tensor few_target = target.narrow(0, kTokens - kFew, kFew);
  CrossEntropyInPlace({.tokens = kFew, .vocabulary = kVocabulary}, Data<T>(few),
                      Data<int64_t>(few_target), kScale, Data<float>(few_loss), nullptr);
  EXPECT_TRUE(BitEqual(logits.narrow(0, kTokens - kFew, kFew), few));
  EXPECT_TRUE(BitEqual(loss.narrow(0, kTokens - kFew, kFew), few_loss));
}

}  // namespace
}  // namespace oom::testing
