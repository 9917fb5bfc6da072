// The rule is AdamW: it follows PyTorch's formula in double precision, and the faults that a
// training system can have (wrong beta, forgotten decay, scaled gradient, ...) leave that path
// visibly.

#include <cmath>
#include <functional>

#include "tests/optim/adamw_testing.h"

namespace oom {
namespace {

constexpr int64_t kElements = kTestBlockElements;
constexpr int kSteps = 30;
constexpr double kLearningRate = 1e-3;
const AdamWHyperparameters kHyper{
    .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};

// What torch.optim.AdamW documents, in double: decay first, then the step with bias correction.
struct DoubleAdamW {
  std::vector<double> w, m, v;

  void Step(const std::vector<float>& gradient, int step, double clip) {
    const double correction1 = 1.0 - std::pow(kHyper.beta1, step);
    const double correction2 = 1.0 - std::pow(kHyper.beta2, step);
    for (int64_t i = 0; i < kElements; ++i) {
      const double g = gradient[i] * clip;
      w[i] *= 1.0 - kLearningRate * kHyper.weight_decay;
      m[i] = kHyper.beta1 * m[i] + (1.0 - kHyper.beta1) * g;
      v[i] = kHyper.beta2 * v[i] + (1.0 - kHyper.beta2) * g * g;
      const double denominator = std::sqrt(v[i]) / std::sqrt(correction2) + kHyper.epsilon;
      w[i] -= kLearningRate / correction1 * m[i] / denominator;
    }
  }
};

// The differences of one training from the double one: ||a-b|| / ||b|| of what changed in the
// weights, and of the moments.
struct Difference {
  double change, moment1, moment2;
};

// Trains for kSteps. `fault` may bend the scalars and the gradient of any step.
using Fault =
    std::function<void(AdamWHyperparameters*, AdamWScalars*, std::vector<float>*, int step)>;

template <class Buffers>
Difference TrainAndCompare(SimdLevel level, const Fault& fault) {
  const ScopedOptimizerMxcsr mxcsr;
  Patterns patterns(7);
  Buffers state(1);
  DoubleAdamW reference{std::vector<double>(kElements), std::vector<double>(kElements),
                        std::vector<double>(kElements)};
  std::vector<double> initial(kElements);
  for (int64_t i = 0; i < kElements; ++i) {
    state.SetMaster(i, 0.02f * patterns.Ordinary());
    initial[i] = reference.w[i] = state.Master(i);
  }
  for (int step = 1; step <= kSteps; ++step) {
    std::vector<float> gradient(kElements);
    for (float& g : gradient) g = 1e-3f * (0.3f + patterns.Ordinary());
    const double clip = step % 3 == 0 ? 0.5 : 1.0;
    reference.Step(gradient, step, clip);
    AdamWHyperparameters hyper = kHyper;
    AdamWScalars scalars = MakeAdamWScalars(hyper, kLearningRate, step, true, clip);
    if (fault) fault(&hyper, &scalars, &gradient, step);
    const float* const ranks[] = {gradient.data()};
    AdamWUpdate(level, scalars, Float32Partials{ranks}, state.At(0), kElements);
  }
  double difference[3] = {}, norm[3] = {};
  const auto add = [&](int which, double actual, double expected) {
    difference[which] += (actual - expected) * (actual - expected);
    norm[which] += expected * expected;
  };
  for (int64_t i = 0; i < kElements; ++i) {
    add(0, state.Master(i) - initial[i], reference.w[i] - initial[i]);
    add(1, *state.Moment1(i), reference.m[i]);
    add(2, *state.Moment2(i), reference.v[i]);
  }
  return {std::sqrt(difference[0] / norm[0]), std::sqrt(difference[1] / norm[1]),
          std::sqrt(difference[2] / norm[2])};
}

constexpr double kTolerance = 2e-6;  // Thirty steps of FP32 rounding, 6e-8 each.

TEST(AdamWTrainingTest, FollowsThePyTorchFormulaInDouble) {
  for (const SimdLevel level : {SimdLevel::kScalar, DetectSimdLevel()}) {
    for (const Difference& difference : {TrainAndCompare<SplitBuffers>(level, nullptr),
                                         TrainAndCompare<MasterBuffers>(level, nullptr)}) {
      EXPECT_LT(difference.change, kTolerance);
      EXPECT_LT(difference.moment1, kTolerance);
      EXPECT_LT(difference.moment2, kTolerance);
    }
  }
}

bool IsSeen(const Fault& fault) {
  const Difference difference = TrainAndCompare<SplitBuffers>(DetectSimdLevel(), fault);
  return std::max({difference.change, difference.moment1, difference.moment2}) > 100 * kTolerance;
}

TEST(AdamWTrainingTest, PlantedFaultsAreSeen) {
  using Hyper = AdamWHyperparameters;
  using Gradient = std::vector<float>;
  EXPECT_FALSE(IsSeen(nullptr));
  EXPECT_TRUE(IsSeen([](Hyper* hyper, AdamWScalars* scalars, Gradient*, int step) {
    hyper->beta2 = 0.951;
    *scalars = MakeAdamWScalars(*hyper, kLearningRate, step, true, scalars->clip);
  })) << "wrong beta2";
  EXPECT_TRUE(IsSeen([](Hyper* hyper, AdamWScalars* scalars, Gradient*, int step) {
    *scalars = MakeAdamWScalars(*hyper, kLearningRate, step, false, scalars->clip);
  })) << "no decay";
  EXPECT_TRUE(IsSeen([](Hyper* hyper, AdamWScalars* scalars, Gradient*, int step) {
    *scalars = MakeAdamWScalars(*hyper, kLearningRate, step + 1, true, scalars->clip);
  })) << "bias correction of the next step";
  EXPECT_TRUE(IsSeen([](Hyper*, AdamWScalars* scalars, Gradient*, int) { scalars->clip = 1.0f; }))
      << "clipping forgotten";
  EXPECT_TRUE(IsSeen([](Hyper*, AdamWScalars*, Gradient* gradient, int) {
    for (float& g : *gradient) g *= 1.1f;
  })) << "gradients x1.1";
  EXPECT_TRUE(IsSeen([](Hyper*, AdamWScalars*, Gradient* gradient, int step) {
    if (step == kSteps / 2) std::fill(gradient->begin(), gradient->end(), 0.0f);
  })) << "one step's gradient lost";
}

// Goal: masters kept in BF16 are seen. Method: the low halves are cleared after each step.
TEST(AdamWTrainingTest, MastersKeptInBfloat16AreSeen) {
  Patterns patterns(8);
  SplitBuffers exact(1);
  for (int64_t i = 0; i < kElements; ++i) exact.SetMaster(i, 0.02f * patterns.Ordinary());
  SplitBuffers rounded = exact;
  double difference = 0.0, norm = 0.0;
  std::vector<float> initial(kElements);
  for (int64_t i = 0; i < kElements; ++i) initial[i] = exact.Master(i);
  for (int step = 1; step <= 10; ++step) {
    const std::vector<float> gradient(kElements, 1e-3f);
    const float* const ranks[] = {gradient.data()};
    const AdamWScalars scalars = MakeAdamWScalars(kHyper, 1e-5, step, true, 1.0);
    AdamWUpdate(DetectSimdLevel(), scalars, Float32Partials{ranks}, exact.At(0), kElements);
    AdamWUpdate(DetectSimdLevel(), scalars, Float32Partials{ranks}, rounded.At(0), kElements);
    for (int64_t i = 0; i < kElements; ++i) *rounded.Low(i) = 0;
  }
  for (int64_t i = 0; i < kElements; ++i) {
    difference += std::pow(rounded.Master(i) - exact.Master(i), 2.0);
    norm += std::pow(exact.Master(i) - initial[i], 2.0);
  }
  EXPECT_GT(std::sqrt(difference / norm), 0.1);
}

}  // namespace
}  // namespace oom
