// Speed of GroupedProduct beside at::_grouped_mm and of GroupedWeightGradient beside its weight
// gradient (rounded to bfloat16), all beside one dense bfloat16 product of the same work. One line
// a kernel: median of the runs. Arguments: "product" or "gradient"; none: both.

#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/kernels/grouped_product.h"
#include "runtime/kernels/grouped_weight_gradient.h"
#include "runtime/ops/aten.h"
#include "tests/gpu/bench_timing.h"
#include "tests/gpu/cuda_check.h"

namespace oom {
namespace {

constexpr int kRuns = 20;

struct Candidate {
  std::string name;
  std::function<void()> launch;
  double flops = 0.0;
  std::vector<double> seconds = {};
};

// Times the candidates in turn, so that all meet the same temperatures and clocks.
void Compare(const std::string& shape, int runs, std::vector<Candidate> candidates) {
  const testing::EventTimer timer(/*stream=*/nullptr);
  constexpr int kWarmUps = 2;
  for (int i = 0; i < kWarmUps + runs; ++i) {
    for (Candidate& candidate : candidates) {
      const double seconds = timer.Seconds(candidate.launch);
      if (i >= kWarmUps) candidate.seconds.push_back(seconds);
    }
  }
  std::printf("%s\n", shape.c_str());
  double dense_rate = 0.0;  // The first candidate's.
  for (const Candidate& candidate : candidates) {
    const double median = testing::Median(candidate.seconds);
    const double rate = candidate.flops / median;
    if (dense_rate == 0.0) dense_rate = rate;
    std::printf("  %-26s %9.1f us %7.1f TFLOP/s %5.1f%% of dense\n", candidate.name.c_str(),
                median * 1e6, rate * 1e-12, 100.0 * rate / dense_rate);
  }
  std::fflush(stdout);
}

struct Shape {
  std::vector<int> rows_by_expert;
  int64_t x_width;
  int64_t y_width;
  std::string name;
};

Shape Even(int experts, int rows, int64_t x_width, int64_t y_width) {
  return {std::vector<int>(experts, rows), x_width, y_width,
          std::to_string(experts) + " x " + std::to_string(rows) + " rows, " +
              std::to_string(x_width) + " x " + std::to_string(y_width)};
}

// Loads as a router makes them: log-normal, the largest some six times the mean.
Shape Uneven(int experts, int rows, int64_t x_width, int64_t y_width) {
  at::manual_seed(7);
  const at::Tensor share = at::softmax(at::randn({experts}, at::kDouble).mul_(0.7), 0);
  Shape shape = Even(experts, rows, x_width, y_width);
  for (int e = 0; e < experts; ++e) {
    shape.rows_by_expert[e] =
        static_cast<int>(share[e].item<double>() * experts * static_cast<double>(rows));
  }
  shape.name = "uneven " + shape.name;
  return shape;
}

// A dense product of about the same work.
Candidate DenseProduct(double flops) {
  const int64_t side = static_cast<int64_t>(std::cbrt(flops / 2.0)) / 256 * 256;
  const auto options = at::device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor a = at::randn({side, side}, options);
  const at::Tensor b = at::randn({side, side}, options);
  return {"at::mm, bf16, dense", [=] { at::mm(a, b); },
          2.0 * std::pow(static_cast<double>(side), 3)};
}

at::Tensor RowEnds(const Shape& shape) {
  std::vector<int> row_end(shape.rows_by_expert.size());
  std::partial_sum(shape.rows_by_expert.begin(), shape.rows_by_expert.end(), row_end.begin());
  return at::tensor(row_end, at::kInt).to(at::kCUDA);
}

// `transposed`: as forward multiplies; otherwise as the gradients of inputs do.
void BenchProduct(const Shape& shape, bool transposed) {
  const auto experts = static_cast<int64_t>(shape.rows_by_expert.size());
  const int64_t rows =
      std::accumulate(shape.rows_by_expert.begin(), shape.rows_by_expert.end(), int64_t{0});
  const auto options = at::device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor x_RK = at::randn({rows, shape.x_width}, options);
  const at::Tensor w = transposed ? at::randn({experts, shape.y_width, shape.x_width}, options)
                                  : at::randn({experts, shape.x_width, shape.y_width}, options);
  const at::Tensor row_end_E = RowEnds(shape);
  const at::Tensor y_RN = at::empty({rows, shape.y_width}, options);
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(shape.x_width) *
                       static_cast<double>(shape.y_width);
  std::vector<Candidate> candidates = {DenseProduct(flops)};
  if (HasHopperTensorCores()) {
    const auto own = [=] {
      GroupedProduct({.rows = rows,
                      .expert_count = experts,
                      .x_width = x_RK.size(1),
                      .y_width = y_RN.size(1),
                      .transposed = transposed},
                     static_cast<const __nv_bfloat16*>(x_RK.const_data_ptr()),
                     static_cast<const __nv_bfloat16*>(w.const_data_ptr()),
                     row_end_E.const_data_ptr<int>(),
                     static_cast<__nv_bfloat16*>(y_RN.mutable_data_ptr()), nullptr);
    };
    candidates.push_back({"hopper", own, flops});
  }
  const at::Tensor factor = transposed ? w.transpose(1, 2) : w;
  candidates.push_back(
      {"at::_grouped_mm", [=] { at::_grouped_mm(x_RK, factor, row_end_E); }, flops});
  Compare(shape.name + (transposed ? ", forward" : ", input gradient"), flops > 5e12 ? 10 : kRuns,
          std::move(candidates));
}

void BenchGradient(const Shape& shape, bool portable) {
  const auto experts = static_cast<int64_t>(shape.rows_by_expert.size());
  const int64_t rows =
      std::accumulate(shape.rows_by_expert.begin(), shape.rows_by_expert.end(), int64_t{0});
  const auto options = at::device(at::kCUDA);
  const at::Tensor x_RM = at::randn({rows, shape.x_width}, options.dtype(at::kBFloat16));
  const at::Tensor y_RN = at::randn({rows, shape.y_width}, options.dtype(at::kBFloat16));
  const at::Tensor row_end_E = RowEnds(shape);
  const at::Tensor d_EMN =
      at::zeros({experts, shape.x_width, shape.y_width}, options.dtype(at::kFloat));
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(shape.x_width) *
                       static_cast<double>(shape.y_width);
  const int runs = flops > 5e12 ? 10 : kRuns;
  const auto call = [&](bool accumulate, bool hopper) {
    GroupedWeightGradient({.rows = rows,
                           .expert_count = experts,
                           .x_width = shape.x_width,
                           .y_width = shape.y_width,
                           .d_row_stride = shape.y_width,
                           .d_expert_stride = shape.x_width * shape.y_width},
                          {.accumulate = accumulate, .hopper = hopper},
                          static_cast<const __nv_bfloat16*>(x_RM.const_data_ptr()),
                          static_cast<const __nv_bfloat16*>(y_RN.const_data_ptr()),
                          row_end_E.const_data_ptr<int>(), d_EMN.mutable_data_ptr<float>(),
                          nullptr);
  };
  std::vector<Candidate> candidates = {DenseProduct(flops)};
  if (HasHopperTensorCores()) {
    candidates.push_back({"hopper =", [=] { call(false, true); }, flops});
    candidates.push_back({"hopper +=", [=] { call(true, true); }, flops});
  }
  if (portable) {
    candidates.push_back({"portable =", [=] { call(false, false); }, flops});
    candidates.push_back({"portable +=", [=] { call(true, false); }, flops});
  }
  candidates.push_back(
      {"at::_grouped_mm, bf16 out", [=] { at::_grouped_mm(x_RM.t(), y_RN, row_end_E); }, flops});
  Compare(shape.name, runs, std::move(candidates));
}

void BenchProducts() {
  for (const int rows : {1024, 2048}) {
    for (const auto& distribution : {Even, Uneven}) {
      BenchProduct(distribution(128, rows, 2048, 1536), true);
      BenchProduct(distribution(128, rows, 768, 2048), true);
      BenchProduct(distribution(128, rows, 2048, 768), false);
      BenchProduct(distribution(128, rows, 1536, 2048), false);
    }
  }
  BenchProduct(Even(8, 8192, 4096, 28672), true);
  BenchProduct(Even(8, 8192, 14336, 4096), true);
  BenchProduct(Even(8, 8192, 4096, 14336), false);
}

void BenchGradients() {
  for (const int rows : {1024, 2048}) {
    BenchGradient(Even(128, rows, 1536, 2048), false);
    BenchGradient(Even(128, rows, 2048, 768), false);
  }
  BenchGradient(Even(128, 2048, 2048, 1536), true);
  BenchGradient(Even(128, 2048, 768, 2048), false);
  BenchGradient(Uneven(128, 2048, 1536, 2048), true);
  BenchGradient(Even(8, 8192, 28672, 4096), true);
  BenchGradient(Even(8, 8192, 4096, 28672), false);
  BenchGradient(Even(8, 8192, 4096, 14336), false);
}

}  // namespace
}  // namespace oom

int main(int argument_count, char** arguments) {
  if (!oom::testing::HasGpu()) {
    std::puts("No GPU: skipped.");
    return 77;
  }
  const std::string only = argument_count > 1 ? arguments[1] : "";
  if (only != "gradient") oom::BenchProducts();
  if (only != "product") oom::BenchGradients();
  return 0;
}
