// Times of the delta net's kernels at Qwen3.6-35B's heads, 16 of keys and 32 of values, over 32,768
// tokens: one line a kernel with the median of 20 runs. The rule's lines say TFLOP/s by what its
// products need (10.5 MFLOP forward, 31.5 backward a chunk and value head); its stages and the
// kernels around it say GB/s, and the share of the bandwidth of a device-to-device copy in the same
// run. With an argument, only the lines that contain it are measured.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "runtime/kernels/causal_convolution.h"
#include "runtime/kernels/delta_gates.h"
#include "runtime/kernels/gated_delta_rule.h"
#include "runtime/kernels/gated_delta_rule_stages.h"
#include "runtime/kernels/gated_rms_norm.h"
#include "tests/gpu/bench_timing.h"
#include "tests/gpu/cuda_check.h"
#include "tests/gpu/delta_net/delta_chunks_reference.h"
#include "tests/gpu/device_memory.h"

namespace oom::testing {
namespace {

constexpr int kKeyHeads = 16, kValueHeads = 32;
constexpr int64_t kSize = kDeltaHeadSize;
constexpr int64_t kChannels = (2 * kKeyHeads + kValueHeads) * kSize;

// `elements` of T: a block of 2^20 that `make` fills again and again.
template <class T>
T* Repeated(int64_t elements, const std::function<void(std::vector<float>*)>& make) {
  constexpr int64_t kBlock = int64_t{1} << 20;
  std::vector<float> wide(kBlock);
  make(&wide);
  std::vector<T> values;
  for (const float x : wide) values.push_back(T(x));
  const T* block = Upload(values);
  T* memory = Allocate<T>(elements);
  for (int64_t first = 0; first < elements; first += kBlock) {
    CheckCuda(cudaMemcpy(memory + first, block, std::min(elements - first, kBlock) * sizeof(T),
                         cudaMemcpyDeviceToDevice));
  }
  return memory;
}

std::mt19937 generator(1);

void Normal(std::vector<float>* values) {
  std::normal_distribution<float> normal;
  for (float& x : *values) x = normal(generator);
}

void UnitRows(std::vector<float>* values) {
  Normal(values);
  for (size_t row = 0; row < values->size(); row += kSize) {
    float square = 0.0f;
    for (size_t i = 0; i < kSize; ++i) square += (*values)[row + i] * (*values)[row + i];
    for (size_t i = 0; i < kSize; ++i) (*values)[row + i] /= std::sqrt(square);
  }
}

double copy_bytes_per_second = 0.0;
std::string wanted;

void Report(const std::string& name, double flops, double bytes,
            const std::function<void(cudaStream_t)>& run) {
  if (name.find(wanted) == std::string::npos) return RunOnce(run);
  const double seconds = MedianGraphSeconds(run);
  std::printf("%-44s %8.3f ms", name.c_str(), seconds * 1e3);
  if (flops > 0.0) std::printf(" %7.1f TFLOP/s", flops / seconds * 1e-12);
  if (bytes > 0.0) {
    std::printf(" %7.0f GB/s %5.1f%% of copy", bytes / seconds * 1e-9,
                100.0 * bytes / seconds / copy_bytes_per_second);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void MeasureCopy() {
  constexpr int64_t kBytes = int64_t{2} << 30;
  char* from = Allocate<char>(kBytes);
  CheckCuda(cudaMemset(from, 1, kBytes));
  copy_bytes_per_second = CopyBytesPerSecond({.dropped_runs = 3, .runs = 20}, from, kBytes);
  std::printf("device copy of 2 GiB: %.0f GB/s, read and written\n", copy_bytes_per_second * 1e-9);
  CheckCuda(cudaFree(from));
}

// Everything that the kernels of one batch read and write.
struct Batch {
  explicit Batch(const std::vector<int64_t>& starts)
      : lists(starts), tokens(starts.back()), documents(static_cast<int64_t>(starts.size()) - 1) {
    shape = {.tokens = tokens,
             .documents = documents,
             .chunks = static_cast<int64_t>(lists.chunks.size()),
             .key_heads = kKeyHeads,
             .value_heads = kValueHeads};
    input = {.chunks = Upload(lists.chunks),
             .document_chunks = Upload(lists.document_chunks),
             .query_TGK = Repeated<__half>(tokens * kKeyHeads * kSize, UnitRows),
             .key_TGK = Repeated<__half>(tokens * kKeyHeads * kSize, UnitRows),
             .value_TNV = Repeated<__nv_bfloat16>(tokens * kValueHeads * kSize, Normal),
             .log_decay_TN = Repeated<float>(tokens * kValueHeads,
                                             [](std::vector<float>* values) {
                                               Normal(values);
                                               for (float& x : *values) x = -0.1f * std::fabs(x);
                                             }),
             .beta_TN = Repeated<float>(tokens * kValueHeads, [](std::vector<float>* values) {
               Normal(values);
               for (float& x : *values) x = 1.0f / (1.0f + std::exp(-x));
             })};
    output = {.output_TNV = Allocate<__nv_bfloat16>(tokens * kValueHeads * kSize),
              .state_DNKV = Allocate<float>(documents * kValueHeads * kSize * kSize)};
    doutput = {.output_TNV = Repeated<float>(tokens * kValueHeads * kSize, Normal)};
    gradients = {.query_TGK = Allocate<float>(tokens * kKeyHeads * kSize),
                 .key_TGK = Allocate<float>(tokens * kKeyHeads * kSize),
                 .value_TNV = Allocate<float>(tokens * kValueHeads * kSize),
                 .log_decay_TN = Allocate<float>(tokens * kValueHeads),
                 .beta_TN = Allocate<float>(tokens * kValueHeads)};
    scratch = Allocate<char>(std::max(GatedDeltaRuleForwardScratchBytes(shape),
                                      GatedDeltaRuleBackwardScratchBytes(shape)));
  }

  const DeltaChunks lists;
  const int64_t tokens;
  const int64_t documents;
  GatedDeltaRuleShape shape;
  GatedDeltaRuleKernelInput input;
  GatedDeltaRuleKernelOutput output;
  GatedDeltaRuleOutputGradient doutput;
  GatedDeltaRuleKernelGradients gradients;
  char* scratch;
};

void BenchRule(const std::string& name, const Batch& b) {
  const double tiles = static_cast<double>(b.shape.chunks * kValueHeads);
  Report(name + " forward", 10.5e6 * tiles, 0.0, [&](cudaStream_t stream) {
    GatedDeltaRuleForward(b.shape, b.input, b.output, b.scratch, stream);
  });
  Report(name + " backward", 31.5e6 * tiles, 0.0, [&](cudaStream_t stream) {
    GatedDeltaRuleBackward(b.shape, b.input, b.doutput, b.gradients, b.scratch, stream);
  });
  // Bytes a chunk and value head: of squares (8 KiB), of tokens (16 KiB, a key head's half of it
  // for each of two value heads), of states (32 KiB).
  constexpr double kSquare = 8192.0, kTokens = 16384.0, kKeys = kTokens / 2, kState = 32768.0;
  const internal::DeltaStage forward{
      b.shape, b.input, internal::DeltaScratch(b.shape, /*backward=*/false, b.scratch)};
  const internal::DeltaStage backward{
      b.shape, b.input, internal::DeltaScratch(b.shape, /*backward=*/true, b.scratch)};
  Report(name + "   prepare, forward", 0.0, tiles * (2 * kKeys + 2 * kSquare),
         [&](cudaStream_t stream) { PrepareDeltaChunks(forward, stream); });
  Report(name + "   scan", 0.0, tiles * (2 * kKeys + 2 * kSquare + 2 * kTokens),
         [&](cudaStream_t stream) { ScanDeltaChunks(forward, b.output, stream); });
  Report(name + "   prepare, backward", 0.0, tiles * (2 * kKeys + 3 * kSquare),
         [&](cudaStream_t stream) { PrepareDeltaChunks(backward, stream); });
  Report(name + "   scan for backward", 0.0, tiles * (kKeys + kSquare + 3 * kTokens + kState),
         [&](cudaStream_t stream) { ScanDeltaChunksForBackward(backward, stream); });
  Report(name + "   scale", 0.0, tiles * 5 * kTokens,
         [&](cudaStream_t stream) { ScaleDeltaGradients(backward, b.doutput, stream); });
  Report(name + "   sweep", 0.0, tiles * (2 * kKeys + 2 * kSquare + 5 * kTokens + kState),
         [&](cudaStream_t stream) { SweepDeltaChunks(backward, b.doutput, b.gradients, stream); });
  Report(name + "   chunk gradients", 0.0, tiles * (kKeys + 4 * kTokens + 4 * kSquare),
         [&](cudaStream_t stream) { DeltaChunkGradients(backward, b.gradients, stream); });
  Report(name + "   key gradients", 0.0,
         tiles * (2 * kKeys + 3 * kTokens + 2 * kSquare + 2 * kState + 2 * kTokens),
         [&](cudaStream_t stream) { DeltaKeyGradients(backward, b.gradients, stream); });
}

void BenchInputs(const Batch& b, const std::vector<int64_t>& starts) {
  const double elements = static_cast<double>(b.tokens * kChannels);
  const CausalConvolutionShape shape{.tokens = b.tokens,
                                     .documents = b.documents,
                                     .key_width = kKeyHeads * kSize,
                                     .value_width = kValueHeads * kSize};
  const CausalConvolutionKernelInput input{
      .x_TC = Repeated<__nv_bfloat16>(b.tokens * kChannels, Normal),
      .weight_CJ = Repeated<__nv_bfloat16>(kChannels * 4, Normal),
      .cu_seqlens = Upload(starts)};
  const CausalConvolutionKernelOutput output{
      .query = Allocate<__half>(b.tokens * kKeyHeads * kSize),
      .key = Allocate<__half>(b.tokens * kKeyHeads * kSize),
      .value = Allocate<__nv_bfloat16>(b.tokens * kValueHeads * kSize),
      .context_DPC = Allocate<__nv_bfloat16>(b.documents * 3 * kChannels)};
  Report("convolution forward", 0.0, elements * 4,
         [&](cudaStream_t stream) { CausalConvolutionForward(shape, input, output, stream); });
  const CausalConvolutionKernelGradients gradients{
      .x_TC = Allocate<__nv_bfloat16>(b.tokens * kChannels),
      .weight_CJ = Repeated<float>(kChannels * 4, Normal)};
  char* scratch = Allocate<char>(CausalConvolutionBackwardScratchBytes(shape));
  Report("convolution backward", 0.0, elements * 8, [&](cudaStream_t stream) {
    CausalConvolutionBackward(shape, input,
                              {.query = b.gradients.query_TGK,
                               .key = b.gradients.key_TGK,
                               .value = b.gradients.value_TNV},
                              gradients, scratch, stream);
  });
  const double gates = static_cast<double>(b.tokens * kValueHeads);
  const DeltaGateKernelInput gate_input{
      .tokens = b.tokens,
      .value_heads = kValueHeads,
      .b_TN = Repeated<__nv_bfloat16>(b.tokens * kValueHeads, Normal),
      .a_TN = Repeated<__nv_bfloat16>(b.tokens * kValueHeads, Normal),
      .a_log_N = Repeated<float>(kValueHeads, Normal),
      .dt_bias_N = Repeated<float>(kValueHeads, Normal)};
  float* const beta = Allocate<float>(b.tokens * kValueHeads);
  float* const log_decay = Allocate<float>(b.tokens * kValueHeads);
  Report("gates forward", 0.0, gates * 12,
         [&](cudaStream_t stream) { DeltaGatesForward(gate_input, beta, log_decay, stream); });
  const DeltaGateKernelGradients gate_gradients{
      .beta_TN = b.gradients.beta_TN,
      .log_decay_TN = b.gradients.log_decay_TN,
      .b_TN = Allocate<__nv_bfloat16>(b.tokens * kValueHeads),
      .a_TN = Allocate<__nv_bfloat16>(b.tokens * kValueHeads),
      .a_log_N = Repeated<float>(kValueHeads, Normal),
      .dt_bias_N = Repeated<float>(kValueHeads, Normal)};
  char* gate_scratch = Allocate<char>(DeltaGatesBackwardScratchBytes(gate_input));
  Report("gates backward", 0.0, gates * 16, [&](cudaStream_t stream) {
    DeltaGatesBackward(gate_input, gate_gradients, gate_scratch, stream);
  });
}

void BenchNorm(const Batch& b) {
  const int64_t rows = b.tokens * kValueHeads;
  const double elements = static_cast<double>(rows * kSize);
  const GatedRmsNormInput input{.rows = rows,
                                .epsilon = 1e-6f,
                                .x_RV = Repeated<__nv_bfloat16>(rows * kSize, Normal),
                                .gate_RV = Repeated<__nv_bfloat16>(rows * kSize, Normal),
                                .weight_V = Repeated<float>(kSize, Normal)};
  __nv_bfloat16* const y = Allocate<__nv_bfloat16>(rows * kSize);
  Report("gated norm forward", 0.0, elements * 6,
         [&](cudaStream_t stream) { GatedRmsNormForward(input, y, stream); });
  const GatedRmsNormKernelGradients gradients{.x_RV = Allocate<float>(rows * kSize),
                                              .gate_RV = Allocate<__nv_bfloat16>(rows * kSize),
                                              .weight_V = Repeated<float>(kSize, Normal)};
  char* scratch = Allocate<char>(GatedRmsNormBackwardScratchBytes());
  Report("gated norm backward", 0.0, elements * 12,
         [&](cudaStream_t stream) { GatedRmsNormBackward(input, y, gradients, scratch, stream); });
}

std::vector<int64_t> Documents(int64_t count, int64_t tokens) {
  std::vector<int64_t> starts;
  for (int64_t i = 0; i <= count; ++i) starts.push_back(i * tokens);
  return starts;
}

int Main(int argc, char** argv) {
  if (argc > 1) wanted = argv[1];
  if (!HasGpu()) {
    std::printf("no GPU\n");
    return 77;
  }
  MeasureCopy();
  const Batch one(Documents(1, 32768)), four(Documents(4, 8192));
  BenchRule("1 x 32768", one);
  BenchRule("4 x 8192", four);
  BenchInputs(one, Documents(1, 32768));
  BenchNorm(one);
  return 0;
}

}  // namespace
}  // namespace oom::testing

int main(int argc, char** argv) { return oom::testing::Main(argc, argv); }
