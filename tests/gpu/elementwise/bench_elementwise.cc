// Times the elementwise kernels on the shapes of Qwen3-30B-A3B and Mixtral with 32,768 tokens: one
// line a kernel with the median of 20 runs, the bytes that must move over that time, and their
// share of what a device-to-device copy moves in the same program.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "runtime/kernels/adamw.h"
#include "runtime/kernels/cross_entropy.h"
#include "runtime/kernels/gradient.h"
#include "runtime/kernels/output_gate.h"
#include "runtime/kernels/rms_norm.h"
#include "runtime/kernels/rotary.h"
#include "runtime/kernels/swiglu.h"
#include "tests/gpu/bench_timing.h"
#include "tests/gpu/cuda_check.h"
#include "tests/gpu/elementwise/device_array.h"

namespace oom::testing {
namespace {

using Narrow = __nv_bfloat16;

constexpr int64_t kTokens = 32768;

double copy_bytes_per_second = 0.0;

constexpr TimingOptions kTiming{.warm_ups = 3, .runs = 20};

void Report(const std::string& name, const std::string& shape, int64_t bytes,
            const std::function<void()>& run) {
  const double seconds = MedianSeconds(kTiming, run);
  CheckCuda(cudaGetLastError());
  const double rate = static_cast<double>(bytes) / seconds;
  std::printf("%-34s %-24s %10.1f us %8.0f GB/s %5.1f%% of copy\n", name.c_str(), shape.c_str(),
              seconds * 1e6, rate * 1e-9, 100.0 * rate / copy_bytes_per_second);
  std::fflush(stdout);
}

std::string Dimensions(int64_t a, int64_t b) {
  return std::to_string(a) + " x " + std::to_string(b);
}

// `values` over and over.
template <class T>
DeviceArray<T> Repeated(const std::vector<T>& values, int64_t elements) {
  DeviceArray<T> array(elements);
  int64_t done = std::min<int64_t>(elements, values.size());
  CheckCuda(cudaMemcpy(array.get(), values.data(), done * sizeof(T), cudaMemcpyHostToDevice));
  while (done < elements) {
    const int64_t count = std::min(done, elements - done);
    CheckCuda(
        cudaMemcpy(array.get() + done, array.get(), count * sizeof(T), cudaMemcpyDeviceToDevice));
    done += count;
  }
  return array;
}

// Normal values: no buffer is zero.
template <class T>
DeviceArray<T> RandomArray(int64_t elements, float deviation = 1.0f) {
  static const std::vector<float> values = [] {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> result(1 << 22);
    for (float& value : result) value = normal(random);
    return result;
  }();
  std::vector<T> converted(std::min<int64_t>(elements, values.size()));
  for (size_t i = 0; i < converted.size(); ++i) converted[i] = T(deviation * values[i]);
  return Repeated(converted, elements);
}

void MeasureCopy() {
  constexpr int64_t kBytes = int64_t{4} << 30;
  const DeviceArray<float> from = RandomArray<float>(kBytes / 4);
  copy_bytes_per_second = CopyBytesPerSecond(kTiming, from.get(), kBytes);
  std::printf("copy: %.0f GB/s\n", copy_bytes_per_second * 1e-9);
}

void BenchRmsNorm(int64_t rows, int64_t width) {
  const int64_t elements = rows * width;
  const RmsNormShape shape{.rows = rows, .width = width};
  const auto x = RandomArray<Narrow>(elements), residual = RandomArray<Narrow>(elements);
  const auto weight = RandomArray<Narrow>(width);
  const auto wide_dy = RandomArray<float>(elements);
  const DeviceArray<Narrow> y(elements), sum(elements);
  const DeviceArray<float> dweight = RandomArray<float>(width),
                           scratch(RmsNormBackwardScratchBytes(shape) / 4);
  const std::string dimensions = Dimensions(rows, width);
  Report("rms_norm forward", dimensions, 4 * elements, [&] {
    RmsNormForward(
        shape,
        RmsNormForwardArguments<Narrow>{
            .x_RH = x.get(), .weight_H = weight.get(), .epsilon = 1e-6f, .y_RH = y.get()},
        nullptr);
  });
  Report("add, rms_norm forward", dimensions, 8 * elements, [&] {
    RmsNormForward(shape,
                   RmsNormForwardArguments<Narrow>{.x_RH = x.get(),
                                                   .residual_RH = residual.get(),
                                                   .weight_H = weight.get(),
                                                   .epsilon = 1e-6f,
                                                   .sum_RH = sum.get(),
                                                   .y_RH = y.get()},
                   nullptr);
  });
  Report("rms_norm backward, wide dy, residual", dimensions, 10 * elements, [&] {
    RmsNormBackward(
        shape,
        RmsNormBackwardArguments<Narrow, float, Narrow>{.dy_RH = wide_dy.get(),
                                                        .x_RH = x.get(),
                                                        .weight_H = weight.get(),
                                                        .epsilon = 1e-6f,
                                                        .residual_gradient_RH = residual.get(),
                                                        .dx_RH = y.get(),
                                                        .dweight_H = dweight.get(),
                                                        .scratch = scratch.get()},
        nullptr);
  });
  Report("rms_norm backward, bf16 dy", dimensions, 6 * elements, [&] {
    RmsNormBackward(shape,
                    Bfloat16RmsNormBackward{.dy_RH = residual.get(),
                                            .x_RH = x.get(),
                                            .weight_H = weight.get(),
                                            .epsilon = 1e-6f,
                                            .dx_RH = y.get(),
                                            .dweight_H = dweight.get(),
                                            .scratch = scratch.get()},
                    nullptr);
  });
}

void BenchRotary(int64_t heads, int64_t all_heads, bool with_norm) {
  constexpr int64_t kSize = 128;
  const RotaryShape shape{
      .tokens = kTokens, .heads = heads, .head_size = kSize, .rotary_size = kSize};
  const int64_t elements = kTokens * heads * kSize, table = kTokens * kSize / 2;
  const auto qkv = RandomArray<Narrow>(kTokens * all_heads * kSize);
  const auto dy = RandomArray<Narrow>(elements), norm = RandomArray<Narrow>(kSize);
  const DeviceArray<Narrow> cosine(table), sine(table), y(elements);
  const DeviceArray<float> dnorm = RandomArray<float>(kSize),
                           scratch(NormRotaryBackwardScratchBytes(shape) / 4);
  std::vector<int32_t> positions(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) positions[i] = static_cast<int32_t>(i % 4096);
  const DeviceArray<int32_t> on_device(positions);
  const auto fill = [&] {
    FillRotaryTable(RotaryTableArguments<Narrow>{.tokens = kTokens,
                                                 .rotary_size = kSize,
                                                 .pair_count = kSize / 2,
                                                 .theta = 1e6,
                                                 .cosine = cosine.get(),
                                                 .sine = sine.get()},
                    on_device.get(), nullptr);
  };
  fill();
  const std::string dimensions = Dimensions(kTokens, heads) + " x 128";
  if (!with_norm) Report("rotary table", Dimensions(kTokens, 128), 4 * table, fill);
  const std::string name = std::string(with_norm ? "norm, rotary" : "rotary") +
                           (heads < all_heads ? " of " + std::to_string(all_heads) : "");
  Report(name + " forward", dimensions, 4 * elements + 4 * table, [&] {
    NormRotaryForward(shape,
                      NormRotaryForwardArguments<Narrow>{.x_TNd = qkv.get(),
                                                         .x_token_stride = all_heads * kSize,
                                                         .norm_d = with_norm ? norm.get() : nullptr,
                                                         .epsilon = 1e-6f,
                                                         .cosine = cosine.get(),
                                                         .sine = sine.get(),
                                                         .y_TNd = y.get(),
                                                         .y_token_stride = heads * kSize},
                      nullptr);
  });
  Report(name + " backward", dimensions, (with_norm ? 6 : 4) * elements + 4 * table, [&] {
    NormRotaryBackward(
        shape,
        NormRotaryBackwardArguments<Narrow>{.dy_TNd = dy.get(),
                                            .dy_token_stride = heads * kSize,
                                            .x_TNd = qkv.get(),
                                            .x_token_stride = all_heads * kSize,
                                            .norm_d = with_norm ? norm.get() : nullptr,
                                            .epsilon = 1e-6f,
                                            .cosine = cosine.get(),
                                            .sine = sine.get(),
                                            .dx_TNd = y.get(),
                                            .dx_token_stride = heads * kSize,
                                            .dnorm_d = with_norm ? dnorm.get() : nullptr,
                                            .scratch = scratch.get()},
        nullptr);
  });
}

// Qwen3.5's query: heads of 256 of which 64 elements turn, each with its gate beside it.
void BenchGatedQuery(int64_t heads) {
  constexpr int64_t kSize = 256, kRotary = 64;
  const RotaryShape shape{
      .tokens = kTokens, .heads = heads, .head_size = kSize, .rotary_size = kRotary};
  const int64_t elements = kTokens * heads * kSize, table = kTokens * kRotary / 2;
  const auto rows = RandomArray<Narrow>(2 * elements), dy = RandomArray<Narrow>(elements);
  const auto norm = RandomArray<Narrow>(kSize);
  const auto cosine = RandomArray<Narrow>(table), sine = RandomArray<Narrow>(table);
  const DeviceArray<Narrow> y(elements), drows(2 * elements);
  const DeviceArray<float> dnorm = RandomArray<float>(kSize),
                           scratch(NormRotaryBackwardScratchBytes(shape) / 4);
  const std::string dimensions = Dimensions(kTokens, heads) + " x 256";
  Report("norm, rotary of 64, gated forward", dimensions, 4 * elements + 4 * table, [&] {
    NormRotaryForward(shape,
                      NormRotaryForwardArguments<Narrow>{.x_TNd = rows.get(),
                                                         .x_token_stride = heads * 2 * kSize,
                                                         .x_head_stride = 2 * kSize,
                                                         .norm_d = norm.get(),
                                                         .scale = NormScale::kOnePlusWeight,
                                                         .epsilon = 1e-6f,
                                                         .cosine = cosine.get(),
                                                         .sine = sine.get(),
                                                         .y_TNd = y.get(),
                                                         .y_token_stride = heads * kSize},
                      nullptr);
  });
  Report("norm, rotary of 64, gated backward", dimensions, 6 * elements + 4 * table, [&] {
    NormRotaryBackward(shape,
                       NormRotaryBackwardArguments<Narrow>{.dy_TNd = dy.get(),
                                                           .dy_token_stride = heads * kSize,
                                                           .x_TNd = rows.get(),
                                                           .x_token_stride = heads * 2 * kSize,
                                                           .x_head_stride = 2 * kSize,
                                                           .norm_d = norm.get(),
                                                           .scale = NormScale::kOnePlusWeight,
                                                           .epsilon = 1e-6f,
                                                           .cosine = cosine.get(),
                                                           .sine = sine.get(),
                                                           .dx_TNd = drows.get(),
                                                           .dx_token_stride = heads * 2 * kSize,
                                                           .dx_head_stride = 2 * kSize,
                                                           .dnorm_d = dnorm.get(),
                                                           .scratch = scratch.get()},
                       nullptr);
  });
  const OutputGateShape gate{.rows = kTokens * heads, .width = kSize, .gate_stride = 2 * kSize};
  Report("output gate forward", dimensions, 6 * elements,
         [&] { OutputGateForward(gate, dy.get(), rows.get() + kSize, y.get(), nullptr); });
  const DeviceArray<Narrow> dattention(elements);
  const auto attention = RandomArray<Narrow>(elements);
  Report("output gate backward", dimensions, 12 * elements, [&] {
    OutputGateBackward(gate,
                       {.da_Rd = dy.get(),
                        .o_Rd = attention.get(),
                        .gate_Rd = rows.get() + kSize,
                        .a_Rd = y.get(),
                        .do_Rd = dattention.get(),
                        .dgate_Rd = drows.get() + kSize},
                       nullptr);
  });
}

void BenchSwiglu(int64_t rows, int64_t width, Activation activation = Activation::kSilu) {
  const SwigluShape shape{.rows = rows, .width = width, .activation = activation};
  const std::string name = activation == Activation::kSilu ? "swiglu" : "geglu";
  const int64_t elements = rows * width;
  const auto gate_up = RandomArray<Narrow>(2 * elements, 2.0f), da = RandomArray<Narrow>(elements);
  const auto weight = RandomArray<float>(rows);
  const DeviceArray<Narrow> y(elements), dgate_up(2 * elements);
  const DeviceArray<float> dweight(rows);
  Report(name + " forward", Dimensions(rows, width), 6 * elements,
         [&] { SwigluForward(shape, gate_up.get(), y.get(), nullptr); });
  Report(name + " backward, weighted", Dimensions(rows, width), 12 * elements, [&] {
    SwigluBackward(shape,
                   SwigluBackwardArguments<Narrow>{.da_RI = da.get(),
                                                   .gate_up_RF = gate_up.get(),
                                                   .weight_R = weight.get(),
                                                   .dgate_up_RF = dgate_up.get(),
                                                   .weighted_RI = y.get(),
                                                   .dweight_R = dweight.get()},
                   nullptr);
  });
}

void BenchCrossEntropy(int64_t tokens, int64_t vocabulary, float cap = 0.0f) {
  const CrossEntropyShape shape{.tokens = tokens, .vocabulary = vocabulary, .logit_cap = cap};
  const std::string name = cap == 0.0f ? "cross entropy" : "capped cross entropy";
  const int64_t bytes = tokens * vocabulary * 2;
  const auto logits = RandomArray<Narrow>(tokens * vocabulary, 4.0f);
  std::vector<int64_t> targets(tokens);
  for (int64_t i = 0; i < tokens; ++i) targets[i] = i * 7919 % vocabulary;
  const DeviceArray<int64_t> target(targets);
  const DeviceArray<float> loss(tokens);
  const DeviceArray<double> sum(std::vector<double>{0.0});
  const DeviceArray<int64_t> valid(std::vector<int64_t>{0});
  Report(name + " loss", Dimensions(tokens, vocabulary), bytes,
         [&] { CrossEntropyLoss(shape, logits.get(), target.get(), loss.get(), nullptr); });
  // From the second run on the logits are gradients: other values, the same work.
  Report(name + " in place", Dimensions(tokens, vocabulary), 2 * bytes, [&] {
    CrossEntropyInPlace(shape, logits.get(), target.get(), 1.0f, loss.get(), nullptr);
  });
  Report("sum of losses", std::to_string(tokens), tokens * 12,
         [&] { SumLosses(tokens, loss.get(), target.get(), sum.get(), valid.get(), nullptr); });
}

void BenchOptimizer() {
  constexpr int64_t kElements = int64_t{1} << 28, kBlocks = kElements / 4096;
  const std::string count = "2^28";
  const AdamWScalars scalars{.beta1 = 0.9f,
                             .one_minus_beta1 = 0.1f,
                             .beta2 = 0.95f,
                             .one_minus_beta2 = 0.05f,
                             .decay = 0.9999f,
                             .step_size = 1e-4f,
                             .second_correction = 1.1f,
                             .epsilon = 1e-8f,
                             .clip = 0.9f};
  // Normal second moments are half negative; squares instead, so that no step is a special case.
  std::vector<float> block(4096 * 10 / 4);
  for (int i = 0; i < 4096; ++i) {
    block[i] = 1e-3f * static_cast<float>(i % 97 - 48);
    block[4096 + i] = 1e-6f * static_cast<float>(i % 89 + 1);
  }
  const DeviceArray<float> rest = Repeated(block, kElements * 10 / 4);
  const auto weight = RandomArray<Narrow>(kElements), narrow = RandomArray<Narrow>(2 * kElements);
  const auto wide = RandomArray<float>(kElements), sum = RandomArray<float>(kElements);
  const DeviceArray<double> squares(kBlocks), total(std::vector<double>{0.0});
  const DeviceArray<int32_t> finite(std::vector<int32_t>{1});
  const DeviceArray<uint8_t> decayed(std::vector<uint8_t>(kBlocks, 1));
  const auto* const first = reinterpret_cast<const uint16_t*>(narrow.get());
  const std::vector<const uint16_t*> two = {first, first + kElements};
  const std::vector<const float*> one_wide = {wide.get()};
  const Bfloat16Partials one_rank{{two.data(), 1}}, two_ranks{two};
  const DeviceAdamWOptions options{.scalars = scalars, .decayed_blocks = decayed.get()};
  const SplitState split{.weight = reinterpret_cast<uint16_t*>(weight.get()),
                         .rest = reinterpret_cast<std::byte*>(rest.get())};
  Report("adamw split, bf16 gradient", count, kElements * 26,
         [&] { AdamWUpdate(options, one_rank, split, kElements, nullptr); });
  Report("adamw split, 2 ranks", count, kElements * 28,
         [&] { AdamWUpdate(options, two_ranks, split, kElements, nullptr); });
  Report("adamw split, float gradient", count, kElements * 28,
         [&] { AdamWUpdate(options, Float32Partials{one_wide}, split, kElements, nullptr); });
  const MasterState master{.master = sum.get(), .rest = reinterpret_cast<std::byte*>(rest.get())};
  Report("adamw masters", count, kElements * 28,
         [&] { AdamWUpdate(options, Float32Partials{one_wide}, master, kElements, nullptr); });
  Report("round to bf16", count, kElements * 6, [&] {
    RoundToBfloat16(wide.get(), kElements, reinterpret_cast<uint16_t*>(weight.get()), nullptr);
  });
  Report("accumulate float32", count, kElements * 12,
         [&] { AccumulateFloat32(wide.get(), kElements, sum.get(), nullptr); });
  Report("gradient squares, bf16", count, kElements * 2,
         [&] { GradientSquares(one_rank, kElements, squares.get(), finite.get(), nullptr); });
  Report("gradient squares, 2 ranks", count, kElements * 4,
         [&] { GradientSquares(two_ranks, kElements, squares.get(), finite.get(), nullptr); });
  Report("gradient squares, float", count, kElements * 4, [&] {
    GradientSquares(Float32Partials{one_wide}, kElements, squares.get(), finite.get(), nullptr);
  });
  Report("add squares in order", std::to_string(kBlocks), kBlocks * 8,
         [&] { AddSquaresInOrder(squares.get(), kBlocks, total.get(), nullptr); });
}

}  // namespace

void BenchElementwise(const std::string& only) {
  MeasureCopy();
  const auto wanted = [&](const char* group) { return only.empty() || only == group; };
  if (wanted("rms_norm")) {
    BenchRmsNorm(kTokens, 2048);
    BenchRmsNorm(kTokens, 4096);
    BenchRmsNorm(kTokens * 32, 128);
  }
  if (wanted("rotary")) {
    BenchRotary(/*heads=*/32, /*all_heads=*/40, /*with_norm=*/true);
    BenchRotary(/*heads=*/4, /*all_heads=*/40, /*with_norm=*/true);
    BenchRotary(/*heads=*/32, /*all_heads=*/32, /*with_norm=*/true);  // As layers have them.
    BenchRotary(/*heads=*/4, /*all_heads=*/4, /*with_norm=*/true);
    BenchRotary(/*heads=*/32, /*all_heads=*/48, /*with_norm=*/false);
    BenchGatedQuery(/*heads=*/16);
  }
  if (wanted("swiglu")) {
    BenchSwiglu(kTokens * 8, 768);
    BenchSwiglu(kTokens * 2, 14336);
    BenchSwiglu(kTokens * 8, 704, Activation::kGeluTanh);
  }
  if (wanted("cross_entropy")) {
    BenchCrossEntropy(8192, 151936);
    BenchCrossEntropy(32768, 32000);
    BenchCrossEntropy(4096, 262144);
    BenchCrossEntropy(4096, 262144, 30.0f);
  }
  if (wanted("optimizer")) BenchOptimizer();
}

}  // namespace oom::testing

// The first argument, if any, is the one group to time.
int main(int argument_count, char** arguments) {
  if (!oom::testing::HasGpu()) {
    std::puts("no CUDA device");
    return 77;
  }
  oom::testing::BenchElementwise(argument_count > 1 ? arguments[1] : "");
}
