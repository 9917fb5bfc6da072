// Times of the routing kernels at the shapes of real models, beside the machine's copy bandwidth:
// one line a kernel with the median of 20 runs, the bytes that must move over that time, and the
// share of the bandwidth of a device-to-device copy in the same run. With an argument, only the
// lines that contain it are measured.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "runtime/kernels/embedding.h"
#include "runtime/kernels/expert_groups.h"
#include "runtime/kernels/router.h"
#include "runtime/kernels/token_rows.h"
#include "tests/gpu/bench_timing.h"
#include "tests/gpu/cuda_check.h"
#include "tests/gpu/device_memory.h"

namespace oom::testing {
namespace {

// Random activations: a block of 4 Mi elements again and again.
__nv_bfloat16* RandomRows(int64_t elements) {
  static const __nv_bfloat16* const block = [] {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<__nv_bfloat16> values(4 << 20);
    for (__nv_bfloat16& value : values) value = __float2bfloat16_rn(normal(generator));
    return Upload(values);
  }();
  __nv_bfloat16* rows = Allocate<__nv_bfloat16>(elements);
  for (int64_t first = 0; first < elements; first += 4 << 20) {
    CheckCuda(cudaMemcpy(rows + first, block, std::min<int64_t>(elements - first, 4 << 20) * 2,
                         cudaMemcpyDeviceToDevice));
  }
  return rows;
}

double copy_bytes_per_second = 0.0;
std::string wanted;

void Report(const std::string& name, double bytes, const std::function<void(cudaStream_t)>& run) {
  if (name.find(wanted) == std::string::npos) return RunOnce(run);
  const double seconds = MedianGraphSeconds(run);
  std::printf("%-58s %9.1f us %8.0f GB/s %5.1f%% of copy\n", name.c_str(), seconds * 1e6,
              bytes / seconds * 1e-9, 100.0 * bytes / seconds / copy_bytes_per_second);
  std::fflush(stdout);
}

void MeasureCopy() {
  constexpr int64_t kBytes = int64_t{2} << 30;
  __nv_bfloat16* from = RandomRows(kBytes / 2);
  copy_bytes_per_second = CopyBytesPerSecond({.dropped_runs = 3, .runs = 20}, from, kBytes);
  std::printf("device copy of 2 GiB: %.0f GB/s, read and written\n", copy_bytes_per_second * 1e-9);
  CheckCuda(cudaFree(from));
}

struct Model {
  const char* name;
  int64_t tokens;
  int experts;
  int choices;
  int64_t hidden;
  bool rounded;
};

void BenchMixture(const Model& model) {
  const std::string label = std::string(model.name) + " T" + std::to_string(model.tokens) + " ";
  const double tokens = static_cast<double>(model.tokens);
  const int64_t rows = model.tokens * model.choices;
  const RouterShape router = {.token_count = model.tokens,
                              .expert_count = model.experts,
                              .experts_per_token = model.choices,
                              .round_weights = model.rounded};
  const __nv_bfloat16* logits = RandomRows(model.tokens * model.experts);
  RouterChoice choice = {.expert_TK = Allocate<int32_t>(rows),
                         .weight_TK = Allocate<float>(rows),
                         .applied_TK = Allocate<float>(rows)};
  const double choice_bytes = 12.0 * static_cast<double>(rows);
  Report(label + "router forward", 2 * tokens * model.experts + choice_bytes,
         [&](cudaStream_t stream) { RouterForward(router, logits, choice, stream); });
  RouterChoice counted = choice;
  counted.probability_BE = Allocate<double>(RouterBlocks(router) * model.experts);
  Report(label + "router forward with sums", 2 * tokens * model.experts + choice_bytes,
         [&](cudaStream_t stream) { RouterForward(router, logits, counted, stream); });

  float* dlogits = Allocate<float>(model.tokens * model.experts);
  RouterBackwardInput backward = {.expert_TK = choice.expert_TK,
                                  .weight_TK = choice.weight_TK,
                                  .dweight_TK = choice.applied_TK};
  Report(label + "router backward", 4 * tokens * model.experts + choice_bytes,
         [&](cudaStream_t stream) { RouterBackward(router, logits, backward, dlogits, stream); });
  backward.balance = {.fraction_E = dlogits, .scale = 1e-3};
  float* balanced = Allocate<float>(model.tokens * model.experts);
  Report(label + "router backward with balance", 6 * tokens * model.experts + choice_bytes,
         [&](cudaStream_t stream) { RouterBackward(router, logits, backward, balanced, stream); });

  const ExpertGroupShape shape = {.token_count = model.tokens,
                                  .expert_count = model.experts,
                                  .experts_per_token = model.choices};
  const ExpertGroupArrays groups = {.first_row_E1 = Allocate<int32_t>(model.experts + 1),
                                    .pair_R = Allocate<int32_t>(rows),
                                    .token_R = Allocate<int32_t>(rows),
                                    .rows_TK = Allocate<int32_t>(rows)};
  char* scratch = Allocate<char>(ExpertGroupScratchBytes(shape));
  Report(label + "expert groups", 16.0 * static_cast<double>(rows), [&](cudaStream_t stream) {
    GroupRowsByExpert(shape, choice.expert_TK, groups, scratch, stream);
  });
  int64_t* count = Allocate<int64_t>(model.experts);
  double* probability = Allocate<double>(model.experts);
  CheckCuda(cudaMemset(count, 0, model.experts * sizeof(int64_t)));
  CheckCuda(cudaMemset(probability, 0, model.experts * sizeof(double)));
  Report(label + "router stats", 8.0 * static_cast<double>(RouterBlocks(router) * model.experts),
         [&](cudaStream_t stream) {
           AddRouterStats(router, counted.probability_BE, groups.first_row_E1, count, probability,
                          stream);
         });
  float* weight = Allocate<float>(rows);
  Report(label + "weights to rows", 12.0 * static_cast<double>(rows), [&](cudaStream_t stream) {
    PairsToRows(groups.pair_R, rows, choice.applied_TK, weight, stream);
  });

  const double row_bytes = 2.0 * static_cast<double>(model.hidden);
  const double all = static_cast<double>(rows) * row_bytes;
  const __nv_bfloat16* x = RandomRows(model.tokens * model.hidden);
  __nv_bfloat16* expanded = RandomRows(rows * model.hidden);
  __nv_bfloat16* y = Allocate<__nv_bfloat16>(model.tokens * model.hidden);
  float* sum = Allocate<float>(model.tokens * model.hidden);
  const TokenRows token_rows = {.rows_TK = groups.rows_TK,
                                .token_count = model.tokens,
                                .rows_per_token = model.choices,
                                .hidden_size = model.hidden};
  Report(label + "gather (rows read + written)", 2 * all, [&](cudaStream_t stream) {
    GatherRows({.index_R = groups.token_R, .row_count = rows, .hidden_size = model.hidden}, x,
               expanded, stream);
  });
  Report(label + "spread (tokens read, rows written)", all + tokens * row_bytes,
         [&](cudaStream_t stream) { SpreadRows(token_rows, x, expanded, stream); });
  Report(label + "combine", all + 2 * tokens * row_bytes,
         [&](cudaStream_t stream) { CombineRows(token_rows, expanded, weight, x, y, stream); });
  Report(label + "sum of rows to FP32", all + 2 * tokens * row_bytes,
         [&](cudaStream_t stream) { SumTokenRows(token_rows, expanded, sum, stream); });
  Report(label + "sum of rows to BF16", all + tokens * row_bytes,
         [&](cudaStream_t stream) { SumTokenRows(token_rows, expanded, y, stream); });
  for (const void* memory : {static_cast<const void*>(x), static_cast<const void*>(expanded),
                             static_cast<const void*>(y), static_cast<const void*>(sum)}) {
    CheckCuda(cudaFree(const_cast<void*>(memory)));
  }
}

// Tokens whose frequency falls as 1 / rank.
std::vector<int32_t> ZipfTokens(int64_t tokens, int64_t vocabulary) {
  std::vector<double> cumulative(vocabulary);
  double sum = 0.0;
  for (int64_t v = 0; v < vocabulary; ++v) cumulative[v] = sum += 1.0 / static_cast<double>(v + 1);
  std::vector<int32_t> names(vocabulary);  // Rank to token: frequent tokens lie anywhere.
  for (int64_t v = 0; v < vocabulary; ++v) names[v] = static_cast<int32_t>(v);
  std::mt19937_64 generator(2);
  std::shuffle(names.begin(), names.end(), generator);
  std::uniform_real_distribution<double> uniform(0.0, sum);
  std::vector<int32_t> result(tokens);
  for (int32_t& token : result) {
    const auto at = std::lower_bound(cumulative.begin(), cumulative.end(), uniform(generator));
    token = names[std::min<int64_t>(at - cumulative.begin(), vocabulary - 1)];
  }
  return result;
}

void BenchEmbedding(const std::string& label, const std::vector<int32_t>& tokens,
                    int64_t vocabulary, int64_t hidden) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  const int32_t* token_T = Upload(tokens);
  const TokenGroups groups = {.count = Allocate<int32_t>(1),
                              .row_U = Allocate<int32_t>(count),
                              .first_U = Allocate<int32_t>(count),
                              .position_T = Allocate<int32_t>(count),
                              .index_T = Allocate<int32_t>(count),
                              .frequent_count = Allocate<int32_t>(1),
                              .frequent = Allocate<int32_t>(FrequentRows(count))};
  char* scratch = Allocate<char>(GroupTokensScratchBytes(count));
  Report(label + " group tokens", 20.0 * static_cast<double>(count), [&](cudaStream_t stream) {
    GroupTokens(token_T, count, vocabulary, groups, scratch, stream);
  });
  int32_t rows = 0;
  int32_t frequent = 0;
  CheckCuda(cudaMemcpy(&rows, groups.count, sizeof(rows), cudaMemcpyDeviceToHost));
  CheckCuda(cudaMemcpy(&frequent, groups.frequent_count, sizeof(frequent), cudaMemcpyDeviceToHost));
  std::printf("%s: %d distinct tokens, %d frequent\n", label.c_str(), rows, frequent);

  const double dy_bytes = 2.0 * static_cast<double>(count * hidden);
  const double row_elements = static_cast<double>(rows) * static_cast<double>(hidden);
  const __nv_bfloat16* dy = RandomRows(count * hidden);
  float* sum = Allocate<float>(count * hidden);
  __nv_bfloat16* rounded = Allocate<__nv_bfloat16>(count * hidden);
  const EmbeddingShape shape = {.token_count = count, .hidden_size = hidden};
  Report(label + " gradient by row, FP32", dy_bytes + 4 * row_elements,
         [&](cudaStream_t stream) { EmbeddingBackwardByRow(shape, dy, groups, sum, stream); });
  Report(label + " gradient by row, BF16", dy_bytes + 2 * row_elements,
         [&](cudaStream_t stream) { EmbeddingBackwardByRow(shape, dy, groups, rounded, stream); });
  Report(label + " group tokens and gradient, FP32", dy_bytes + 4 * row_elements,
         [&](cudaStream_t stream) {
           GroupTokens(token_T, count, vocabulary, groups, scratch, stream);
           EmbeddingBackwardByRow(shape, dy, groups, sum, stream);
         });
  __nv_bfloat16* y = Allocate<__nv_bfloat16>(count * hidden);
  Report(label + " forward from staging", dy_bytes + 2 * row_elements, [&](cudaStream_t stream) {
    EmbeddingForward(dy, groups.index_T, count, hidden, y, stream);
  });
  void* host = nullptr;
  CheckCuda(cudaHostAlloc(&host, vocabulary * hidden * 2, cudaHostAllocMapped));
  std::fill_n(static_cast<uint16_t*>(host), vocabulary * hidden, uint16_t{0x3f80});
  Report(label + " rows from host to staging", 2 * row_elements, [&](cudaStream_t stream) {
    GatherRows({.index_R = groups.row_U,
                .row_count = count,
                .hidden_size = hidden,
                .count_on_device = groups.count},
               static_cast<const __nv_bfloat16*>(host), y, stream);
  });
  CheckCuda(cudaFreeHost(host));
}

int Main(int argc, char** argv) {
  if (argc > 1) wanted = argv[1];
  if (!HasGpu()) {
    std::printf("no GPU\n");
    return 77;
  }
  MeasureCopy();
  BenchMixture({"qwen3-30b", 32768, 128, 8, 2048, true});
  BenchMixture({"mixtral", 32768, 8, 2, 4096, false});
  BenchEmbedding("zipf T32768 H2048", ZipfTokens(32768, 151936), 151936, 2048);
  std::vector<int32_t> repeated = ZipfTokens(32768, 151936);
  for (int i = 0; i < 10000; ++i) repeated[3 * i] = 77;
  BenchEmbedding("one token 10,000 times", repeated, 151936, 2048);
  return 0;
}

}  // namespace
}  // namespace oom::testing

int main(int argc, char** argv) { return oom::testing::Main(argc, argv); }
