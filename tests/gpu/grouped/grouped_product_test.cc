// Goal: GroupedProduct gives each row's product with its expert's weight, rounded once, for any
// rows per expert and any widths, and writes nothing else. Method: against FP64 products;
// everything outside the experts' rows is NaN; seeds are fixed.

#include "runtime/kernels/grouped_product.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/kernels/grouped_weight_gradient.h"
#include "runtime/ops/aten.h"
#include "tests/gpu/cuda_check.h"
#include "tests/gpu/needs_gpu.h"

namespace oom {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class NeedsHopper : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!testing::HasGpu() || !HasHopperTensorCores()) {
      testing::SkipProgram("skipped: no Hopper GPU");
    }
  }
};
const auto* const needs_hopper = ::testing::AddGlobalTestEnvironment(new NeedsHopper);

at::TensorOptions OnGpu(at::ScalarType type) { return at::device(at::kCUDA).dtype(type); }

struct Case {
  std::vector<int> rows_by_expert;
  int64_t x_width = 0;
  int64_t y_width = 0;
  int64_t spare_rows = 0;  // After the last expert's.
};

struct Tensors {
  at::Tensor x_RK;
  at::Tensor w;
  at::Tensor row_end_E;
  at::Tensor y_RN;
  bool transposed = false;
};

Tensors RandomTensors(const Case& c, bool transposed) {
  const int64_t rows = std::accumulate(c.rows_by_expert.begin(), c.rows_by_expert.end(), 0);
  const auto experts = static_cast<int64_t>(c.rows_by_expert.size());
  std::vector<int> row_end(c.rows_by_expert.size());
  std::partial_sum(c.rows_by_expert.begin(), c.rows_by_expert.end(), row_end.begin());
  Tensors t;
  t.transposed = transposed;
  t.x_RK = at::randn({rows + c.spare_rows, c.x_width}, OnGpu(at::kBFloat16));
  t.x_RK.narrow(0, rows, c.spare_rows).fill_(kNaN);
  t.w = transposed ? at::randn({experts, c.y_width, c.x_width}, OnGpu(at::kBFloat16))
                   : at::randn({experts, c.x_width, c.y_width}, OnGpu(at::kBFloat16));
  t.row_end_E = at::tensor(row_end, at::kInt).to(at::kCUDA);
  t.y_RN = at::full({rows + c.spare_rows, c.y_width}, kNaN, OnGpu(at::kBFloat16));
  return t;
}

void Call(const Tensors& t) {
  GroupedProduct({.rows = t.x_RK.size(0),
                  .expert_count = t.row_end_E.size(0),
                  .x_width = t.x_RK.size(1),
                  .y_width = t.y_RN.size(1),
                  .transposed = t.transposed},
                 static_cast<const __nv_bfloat16*>(t.x_RK.const_data_ptr()),
                 static_cast<const __nv_bfloat16*>(t.w.const_data_ptr()),
                 t.row_end_E.const_data_ptr<int>(),
                 static_cast<__nv_bfloat16*>(t.y_RN.mutable_data_ptr()), nullptr);
}

// The product of one expert's rows in FP64.
at::Tensor Expected(const Tensors& t, int64_t expert, int64_t first, int64_t rows) {
  const at::Tensor w = t.w.select(0, expert).to(at::kDouble);
  return at::mm(t.x_RK.narrow(0, first, rows).to(at::kDouble), t.transposed ? w.t() : w);
}

double Norm(const at::Tensor& tensor) { return tensor.to(at::kDouble).norm().item<double>(); }

class GroupedProductTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { at::manual_seed(20261201); }
  bool transposed() const { return GetParam(); }

  void ExpectRoundedProducts(const Case& c, const std::string& what) {
    const Tensors t = RandomTensors(c, transposed());
    Call(t);
    int64_t first = 0;
    double worst = 0.0;
    for (size_t e = 0; e < c.rows_by_expert.size(); ++e) {
      const int64_t rows = c.rows_by_expert[e];
      if (rows == 0) continue;
      const at::Tensor expected = Expected(t, static_cast<int64_t>(e), first, rows);
      const at::Tensor y = t.y_RN.narrow(0, first, rows);
      const double rounding = Norm(expected.to(at::kBFloat16).to(at::kDouble) - expected);
      const double error = Norm(y.to(at::kDouble) - expected);
      // Few elements lie so near to a tie that the FP32 sum rounds them the other way.
      EXPECT_LE(error, 1.02 * rounding + 1e-6 * Norm(expected)) << what << ", expert " << e;
      worst = std::max(worst, error / rounding);
      first += rows;
    }
    std::printf("  %-44s at most %.4f of the rounding\n", what.c_str(), worst);
    EXPECT_TRUE(t.y_RN.narrow(0, first, c.spare_rows).isnan().all().item<bool>())
        << what << ": wrote behind the last row";
  }
};

INSTANTIATE_TEST_SUITE_P(Weight, GroupedProductTest, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Transposed" : "Plain"; });

TEST_P(GroupedProductTest, IsRightForAnyRowCount) {
  for (const int rows : {1, 7, 16, 17, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 384, 385}) {
    ExpectRoundedProducts(
        {.rows_by_expert = {rows, 3, rows}, .x_width = 192, .y_width = 512, .spare_rows = 70},
        std::to_string(rows) + " rows");
  }
  ExpectRoundedProducts({.rows_by_expert = {0, 5, 0, 0, 129, 1000, 0, 64, 17, 0},
                         .x_width = 256,
                         .y_width = 768,
                         .spare_rows = 1},
                        "uneven rows, empty experts");
  ExpectRoundedProducts(
      {.rows_by_expert = {0, 0, 0}, .x_width = 64, .y_width = 64, .spare_rows = 3}, "no rows");
  ExpectRoundedProducts({.rows_by_expert = {0, 0}, .x_width = 64, .y_width = 64}, "no memory");
}

TEST_P(GroupedProductTest, IsRightForAnyWidth) {
  for (const int64_t x_width : {8, 64, 72, 136, 200, 320}) {
    for (const int64_t y_width : {8, 56, 128, 248, 256, 264, 776}) {
      ExpectRoundedProducts({.rows_by_expert = {77, 0, 200, 300},
                             .x_width = x_width,
                             .y_width = y_width,
                             .spare_rows = 5},
                            std::to_string(x_width) + " to " + std::to_string(y_width));
    }
  }
}

TEST_P(GroupedProductTest, IsRightForManyTilesAndExperts) {
  std::vector<int> rows(kGroupedProductExpertsMax);
  for (size_t e = 0; e < rows.size(); ++e) rows[e] = static_cast<int>(e * 37 % 397);
  ExpectRoundedProducts({.rows_by_expert = rows, .x_width = 136, .y_width = 264}, "512 experts");
  ExpectRoundedProducts({.rows_by_expert = {2048, 1500, 3000, 1}, .x_width = 1536, .y_width = 2048},
                        "many tiles");
}

// Zero times NaN is NaN: an expert that went wrong must not spoil its neighbours.
TEST_P(GroupedProductTest, NaNStaysInItsExpert) {
  const Tensors t =
      RandomTensors({.rows_by_expert = {70, 30, 70}, .x_width = 72, .y_width = 256}, transposed());
  t.x_RK.narrow(0, 70, 30).fill_(kNaN);
  t.w.select(0, 1).fill_(kNaN);
  Call(t);
  EXPECT_FALSE(t.y_RN.narrow(0, 0, 70).isnan().any().item<bool>());
  EXPECT_TRUE(t.y_RN.narrow(0, 70, 30).isnan().all().item<bool>());
  EXPECT_FALSE(t.y_RN.narrow(0, 100, 70).isnan().any().item<bool>());
}

TEST_P(GroupedProductTest, BitsDependOnTheRowAlone) {
  const Tensors t = RandomTensors(
      {.rows_by_expert = {900, 333, 2048, 5}, .x_width = 392, .y_width = 776}, transposed());
  Call(t);
  const at::Tensor first = t.y_RN.clone();
  for (int i = 0; i < 20; ++i) {
    t.y_RN.fill_(kNaN);
    Call(t);
    ASSERT_TRUE(at::equal(first, t.y_RN)) << "run " << i;
  }
  // The second expert's last rows, in other tiles and in another half of them.
  Tensors alone = t;
  alone.x_RK = t.x_RK.narrow(0, 1133, 100);
  alone.w = t.w.narrow(0, 1, 1);
  alone.row_end_E = at::full({1}, 100, OnGpu(at::kInt));
  alone.y_RN = at::full({100, 776}, kNaN, OnGpu(at::kBFloat16));
  Call(alone);
  EXPECT_TRUE(at::equal(alone.y_RN, first.narrow(0, 1133, 100)));
}

TEST_P(GroupedProductTest, OffsetsBeyond32Bits) {
  const int64_t rows = 600000, width = 4096;
  Tensors t;
  t.transposed = transposed();
  t.x_RK = at::zeros({rows, width}, OnGpu(at::kBFloat16));
  ASSERT_GT(t.x_RK.numel(), int64_t{1} << 31);
  t.x_RK.narrow(0, rows - 100, 100).normal_();
  t.w = at::randn({3, width, width}, OnGpu(at::kBFloat16));
  t.row_end_E = at::tensor({300, 599900, 600000}, at::kInt).to(at::kCUDA);
  t.y_RN = at::full({rows, width}, kNaN, OnGpu(at::kBFloat16));
  Call(t);
  EXPECT_FALSE(t.y_RN.narrow(0, 0, rows - 100).any().item<bool>());
  const at::Tensor expected = Expected(t, 2, rows - 100, 100);
  EXPECT_LE(Norm(t.y_RN.narrow(0, rows - 100, 100).to(at::kDouble) - expected) / Norm(expected),
            2e-3);
}

}  // namespace
}  // namespace oom
