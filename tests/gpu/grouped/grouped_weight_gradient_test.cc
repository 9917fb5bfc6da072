// Goal: both versions of GroupedWeightGradient equal the composite operator
// AccumulateWeightGradient in FP64 for any rows per expert and any widths, write what they should
// and nothing else, and depend on nothing but an expert's own rows.
// Method: random rows, everything outside the experts' rows NaN; seeds are fixed.

#include "runtime/kernels/grouped_weight_gradient.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/ops/aten.h"
#include "runtime/ops/precision.h"

namespace oom {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

at::TensorOptions OnGpu(at::ScalarType type) { return at::device(at::kCUDA).dtype(type); }

struct Case {
  std::vector<int> rows_by_expert;
  int64_t x_width = 0;
  int64_t y_width = 0;
  bool accumulate = false;
  int64_t spare_rows = 0;     // After the last expert's.
  int64_t spare_columns = 0;  // Of d.
};

struct Tensors {
  at::Tensor x_RM;
  at::Tensor y_RN;
  at::Tensor row_end_E;
  at::Tensor d_EMN;  // Perhaps a part of wider rows.
};

Tensors RandomTensors(const Case& c) {
  const int64_t rows = std::accumulate(c.rows_by_expert.begin(), c.rows_by_expert.end(), 0);
  const int64_t experts = static_cast<int64_t>(c.rows_by_expert.size());
  std::vector<int> row_end(c.rows_by_expert.size());
  std::partial_sum(c.rows_by_expert.begin(), c.rows_by_expert.end(), row_end.begin());
  Tensors t;
  t.x_RM = at::randn({rows + c.spare_rows, c.x_width}, OnGpu(at::kBFloat16));
  t.y_RN = at::randn({rows + c.spare_rows, c.y_width}, OnGpu(at::kBFloat16));
  t.x_RM.narrow(0, rows, c.spare_rows).fill_(kNaN);
  t.y_RN.narrow(0, rows, c.spare_rows).fill_(kNaN);
  t.row_end_E = at::tensor(row_end, at::kInt).to(at::kCUDA);
  at::Tensor wide =
      at::full({experts, c.x_width, c.y_width + c.spare_columns}, kNaN, OnGpu(at::kFloat));
  t.d_EMN = wide.narrow(2, 0, c.y_width);
  if (c.accumulate) t.d_EMN.normal_();
  return t;
}

void Call(const Tensors& t, bool accumulate, bool hopper) {
  GroupedWeightGradient({.rows = t.x_RM.size(0),
                         .expert_count = t.row_end_E.size(0),
                         .x_width = t.x_RM.size(1),
                         .y_width = t.y_RN.size(1),
                         .d_row_stride = t.d_EMN.stride(1),
                         .d_expert_stride = t.d_EMN.stride(0)},
                        {.accumulate = accumulate, .hopper = hopper},
                        static_cast<const __nv_bfloat16*>(t.x_RM.const_data_ptr()),
                        static_cast<const __nv_bfloat16*>(t.y_RN.const_data_ptr()),
                        t.row_end_E.const_data_ptr<int>(), t.d_EMN.mutable_data_ptr<float>(),
                        nullptr);
}

double Norm(const at::Tensor& tensor) { return tensor.to(at::kDouble).norm().item<double>(); }

// ||d - expected|| / ||expected|| over all experts; `old_EMN` is what d was before.
double Error(const Tensors& t, const at::Tensor& old_EMN, const at::Tensor& d_EMN,
             bool accumulate) {
  double difference = 0.0;
  double size = 0.0;
  const at::Tensor row_end = t.row_end_E.cpu();
  int64_t first = 0;
  for (int64_t e = 0; e < row_end.size(0); ++e) {
    const int64_t end = row_end[e].item<int>();
    at::Tensor expected = accumulate ? old_EMN.select(0, e).to(at::kDouble)
                                     : at::zeros_like(d_EMN.select(0, e), at::kDouble);
    if (end > first) {
      AccumulateWeightGradient(expected, t.x_RM.narrow(0, first, end - first),
                               t.y_RN.narrow(0, first, end - first));
    }
    first = end;
    const double expert_difference = Norm(d_EMN.select(0, e).to(at::kDouble) - expected);
    difference += expert_difference * expert_difference;
    size += Norm(expected) * Norm(expected);
  }
  return size == 0.0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

class GroupedWeightGradientTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !HasHopperTensorCores()) GTEST_SKIP() << "not a Hopper GPU";
    at::manual_seed(20261130);
  }
  bool hopper() const { return GetParam(); }

  void ExpectEqualsComposite(const Case& c, const std::string& what) {
    const Tensors t = RandomTensors(c);
    const at::Tensor old_EMN = t.d_EMN.clone();
    Call(t, c.accumulate, hopper());
    const double error = Error(t, old_EMN, t.d_EMN, c.accumulate);
    std::printf("  %-44s %s relative error %.2e\n", what.c_str(), c.accumulate ? "+=" : "= ",
                error);
    // The tensor cores do not round their sums to nearest: the error grows with the rows.
    const int rows = *std::max_element(c.rows_by_expert.begin(), c.rows_by_expert.end());
    EXPECT_LE(error, 1e-7 + 1.2e-9 * rows) << what;
    if (c.spare_columns > 0) {
      const at::Tensor outside =
          t.d_EMN.as_strided({t.d_EMN.size(0), t.d_EMN.size(1), c.spare_columns}, t.d_EMN.strides(),
                             t.d_EMN.storage_offset() + c.y_width);
      EXPECT_TRUE(outside.isnan().all().item<bool>()) << what << ": wrote between rows";
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Version, GroupedWeightGradientTest, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Hopper" : "Portable"; });

// Goal: each element of d is the product of the right elements of x and y.
// Method: one factor picks a single row for each column of d, the other one's elements are their
// own row or column numbers, so d says which element was read.
TEST_P(GroupedWeightGradientTest, ReadsTheElementThatTheFormulaNames) {
  constexpr int kRows = 64;
  const auto number = [](int64_t size) { return at::arange(size, OnGpu(at::kBFloat16)); };
  for (const bool probe_x : {true, false}) {
    constexpr int64_t kWidth = 256;  // Of both factors; bfloat16 counts no further.
    const at::Tensor picks =
        at::eq(at::arange(kRows, OnGpu(at::kLong)).unsqueeze(1),
               at::remainder(at::arange(kWidth, OnGpu(at::kLong)), kRows).unsqueeze(0))
            .to(at::kBFloat16);
    at::Tensor read[2];  // The row and column number of what entered d[picked, probed].
    for (const int what : {0, 1}) {
      const at::Tensor probed =
          (what == 0 ? number(kRows).unsqueeze(1) : number(kWidth).unsqueeze(0))
              .expand({kRows, kWidth})
              .contiguous();
      Tensors t;
      t.x_RM = probe_x ? probed : picks;
      t.y_RN = probe_x ? picks : probed;
      t.row_end_E = at::full({1}, kRows, OnGpu(at::kInt));
      t.d_EMN = at::full({1, t.x_RM.size(1), t.y_RN.size(1)}, kNaN, OnGpu(at::kFloat));
      Call(t, false, hopper());
      const at::Tensor d = t.d_EMN.select(0, 0).cpu();
      read[what] = (probe_x ? d.t() : d).contiguous();
    }
    int wrong = 0;
    for (int64_t i = 0; i < kWidth; ++i) {
      for (int64_t j = 0; j < kWidth; ++j) {
        const float row = read[0][i][j].item<float>();
        const float column = read[1][i][j].item<float>();
        if (row == static_cast<float>(i % kRows) && column == static_cast<float>(j)) continue;
        // A few of the first and some from everywhere show the pattern.
        if (++wrong <= 8 || (wrong < 4000 && wrong % 97 == 0)) {
          std::printf("  %s row %3ld column %3ld: read row %g column %g\n", probe_x ? "x" : "y",
                      static_cast<long>(i % kRows), static_cast<long>(j), row, column);
        }
      }
    }
    EXPECT_EQ(wrong, 0) << (probe_x ? "of x" : "of y");
  }
}

TEST_P(GroupedWeightGradientTest, EqualsTheCompositeForAnyRowCount) {
  for (const bool accumulate : {false, true}) {
    for (const int rows : {1, 7, 16, 31, 32, 33, 63, 64, 65, 128, 250, 257}) {
      ExpectEqualsComposite({.rows_by_expert = {rows, 3, rows},
                             .x_width = 128,
                             .y_width = 256,
                             .accumulate = accumulate,
                             .spare_rows = 70},
                            std::to_string(rows) + " rows");
    }
    ExpectEqualsComposite({.rows_by_expert = {0, 5, 0, 0, 129, 1000, 0, 64, 17, 0},
                           .x_width = 192,
                           .y_width = 320,
                           .accumulate = accumulate,
                           .spare_rows = 1},
                          "uneven rows, empty experts");
    ExpectEqualsComposite({.rows_by_expert = {0, 0, 0},
                           .x_width = 64,
                           .y_width = 64,
                           .accumulate = accumulate,
                           .spare_rows = 3},
                          "no rows");
    ExpectEqualsComposite(
        {.rows_by_expert = {0, 0}, .x_width = 64, .y_width = 64, .accumulate = accumulate},
        "no memory");
  }
}

TEST_P(GroupedWeightGradientTest, EqualsTheCompositeForAnyWidth) {
  for (const bool accumulate : {false, true}) {
    for (const int64_t x_width : {8, 72, 136, 264, 392}) {
      for (const int64_t y_width : {8, 56, 264, 776}) {
        ExpectEqualsComposite(
            {.rows_by_expert = {77, 0, 200},
             .x_width = x_width,
             .y_width = y_width,
             .accumulate = accumulate,
             .spare_rows = 5,
             .spare_columns = 4},
            std::to_string(x_width) + " x " + std::to_string(y_width) + ", strided d");
      }
    }
  }
}

TEST_P(GroupedWeightGradientTest, EqualsTheCompositeForManyTilesAndExperts) {
  std::vector<int> rows(1024);
  for (size_t e = 0; e < rows.size(); ++e) rows[e] = static_cast<int>(e * 37 % 97);
  for (const bool accumulate : {false, true}) {
    ExpectEqualsComposite(
        {.rows_by_expert = rows, .x_width = 136, .y_width = 264, .accumulate = accumulate},
        "1024 experts");
    ExpectEqualsComposite({.rows_by_expert = {2048, 1500, 3000, 1},
                           .x_width = 1536,
                           .y_width = 2048,
                           .accumulate = accumulate},
                          "many tiles");
  }
}

// Zero times NaN is NaN: an expert that went wrong must not spoil its neighbours.
TEST_P(GroupedWeightGradientTest, NaNStaysInItsExpert) {
  const Tensors t = RandomTensors({.rows_by_expert = {70, 30, 70}, .x_width = 128, .y_width = 256});
  t.x_RM.narrow(0, 70, 30).fill_(kNaN);
  t.y_RN.narrow(0, 70, 30).fill_(kNaN);
  Call(t, false, hopper());
  EXPECT_FALSE(t.d_EMN.select(0, 0).isnan().any().item<bool>());
  EXPECT_TRUE(t.d_EMN.select(0, 1).isnan().all().item<bool>());
  EXPECT_FALSE(t.d_EMN.select(0, 2).isnan().any().item<bool>());
}

TEST_P(GroupedWeightGradientTest, BitsDependOnTheExpertsRowsAlone) {
  const Tensors t =
      RandomTensors({.rows_by_expert = {900, 333, 2048, 5}, .x_width = 392, .y_width = 776});
  Call(t, false, hopper());
  const at::Tensor first = t.d_EMN.clone();
  for (int i = 0; i < 20; ++i) {
    t.d_EMN.fill_(kNaN);
    Call(t, false, hopper());
    ASSERT_TRUE(at::equal(first, t.d_EMN)) << "run " << i;
  }
  Tensors alone = t;
  alone.x_RM = t.x_RM.narrow(0, 900, 333);
  alone.y_RN = t.y_RN.narrow(0, 900, 333);
  alone.row_end_E = at::full({1}, 333, OnGpu(at::kInt));
  alone.d_EMN = at::full({1, 392, 776}, kNaN, OnGpu(at::kFloat));
  Call(alone, false, hopper());
  EXPECT_TRUE(at::equal(alone.d_EMN.select(0, 0), first.select(0, 1)));
}

// Where the Hopper version leaves the addition to the L2 cache, subnormals must survive too.
TEST_P(GroupedWeightGradientTest, AddsTheFinishedSumOnceRoundedToNearest) {
  const Tensors t = RandomTensors(
      {.rows_by_expert = {100, 1}, .x_width = 136, .y_width = 264, .accumulate = true});
  t.d_EMN[1].fill_(std::ldexp(1.0, -140));
  t.x_RM[100].fill_(std::ldexp(1.0, -80));
  t.y_RN[100].fill_(std::ldexp(1.0, -60));
  Tensors sum = t;
  sum.d_EMN = at::full_like(t.d_EMN, kNaN);
  Call(sum, false, hopper());
  const at::Tensor expected = t.d_EMN.cpu() + sum.d_EMN.cpu();
  Call(t, true, hopper());
  EXPECT_TRUE(at::equal(t.d_EMN.cpu(), expected));
  EXPECT_EQ(t.d_EMN[1][0][0].item<float>(), std::ldexp(1.0f, -139));
}

TEST_P(GroupedWeightGradientTest, OffsetsBeyond32Bits) {
  {
    std::vector<int> rows(40, 20);
    const Tensors t = RandomTensors({.rows_by_expert = rows, .x_width = 8192, .y_width = 8192});
    ASSERT_GT(t.d_EMN.numel(), int64_t{1} << 31);
    Call(t, false, hopper());
    at::Tensor expected = at::zeros({8192, 8192}, OnGpu(at::kDouble));
    AccumulateWeightGradient(expected, t.x_RM.narrow(0, 780, 20), t.y_RN.narrow(0, 780, 20));
    EXPECT_LE(Norm(t.d_EMN.select(0, 39).to(at::kDouble) - expected) / Norm(expected), 3e-6);
  }
  Tensors t;
  const int64_t rows = 600000;
  t.x_RM = at::zeros({rows, 4096}, OnGpu(at::kBFloat16));
  t.y_RN = at::zeros({rows, 4096}, OnGpu(at::kBFloat16));
  ASSERT_GT(t.x_RM.numel(), int64_t{1} << 31);
  t.x_RM.narrow(0, rows - 100, 100).normal_();
  t.y_RN.narrow(0, rows - 100, 100).normal_();
  t.row_end_E = at::tensor({300, 599900, 600000}, at::kInt).to(at::kCUDA);
  t.d_EMN = at::full({3, 4096, 4096}, kNaN, OnGpu(at::kFloat));
  Call(t, false, hopper());
  EXPECT_EQ(Norm(t.d_EMN.narrow(0, 0, 2)), 0.0);
  at::Tensor expected = at::zeros({4096, 4096}, OnGpu(at::kDouble));
  AccumulateWeightGradient(expected, t.x_RM.narrow(0, rows - 100, 100),
                           t.y_RN.narrow(0, rows - 100, 100));
  EXPECT_LE(Norm(t.d_EMN.select(0, 2).to(at::kDouble) - expected) / Norm(expected), 3e-6);
}

}  // namespace
}  // namespace oom
