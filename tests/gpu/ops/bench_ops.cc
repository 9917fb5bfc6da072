// Times of the operators of one decoder layer and of the head on the GPU, with random weights: one
// line a program with the median of several runs, the arithmetic that it must do over that time,
// and the most memory that LibTorch gave out while it ran, with what was given out before. Then the
// pieces that the programs are made of. By default Qwen3-30B-A3B, 8 sequences of 4,096 tokens.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "runtime/kernels/cross_entropy.h"
#include "runtime/ops/cuda/attention_cuda.h"
#include "runtime/ops/cuda/cuda_operators.h"
#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/cuda/routed_cuda.h"
#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "runtime/ops/layer.h"
#include "runtime/ops/rms_norm.h"
#include "tests/gpu/bench_timing.h"
#include "tests/gpu/cuda_check.h"

namespace oom {
namespace {

double AllocatedGiB(bool peak) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  const auto& all = stats.allocated_bytes[0];
  return static_cast<double>(peak ? all.peak : all.current) / static_cast<double>(1 << 30);
}

// `flops` 0: not a matter of arithmetic.
void Report(const std::string& name, double flops, const std::function<void()>& run) {
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  const double before = AllocatedGiB(/*peak=*/false);
  const double seconds =
      testing::MedianSeconds({.stream = OperatorStream(), .warm_ups = 2, .runs = 7}, run);
  std::printf("%-34s %8.3f ms", name.c_str(), seconds * 1e3);
  if (flops > 0) std::printf("  %6.1f TFLOP/s", flops / seconds * 1e-12);
  std::printf("  %7.3f GiB at most, %7.3f before\n", AllocatedGiB(/*peak=*/true), before);
  std::fflush(stdout);
}

at::Tensor RandomWeight(at::IntArrayRef shape) {
  return at::randn(shape, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16)).mul_(0.02);
}

at::Tensor RandomRows(int64_t rows, int64_t columns) {
  return at::randn({rows, columns}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
}

at::Tensor Ones(int64_t size) {
  return at::ones({size}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
}

at::Tensor Gradient(const at::Tensor& weight) { return at::zeros_like(weight, at::kFloat); }

ModelDescription Qwen3() {
  ModelDescription model;
  model.family = Family::kQwen3Moe;
  model.hidden_size = 2048;
  model.vocabulary_size = 151936;
  model.expert_count = 128;
  model.experts_per_token = 8;
  model.expert_width = 768;
  model.layers.resize(1);
  model.layers[0].attention = {.query_head_count = 32,
                               .kv_head_count = 4,
                               .head_size = 128,
                               .query_key_norm = true,
                               .rotary = {.theta = 1e6, .size = 128, .pair_count = 64}};
  return model;
}

struct Bench {
  Bench(const ModelDescription& model, int64_t sequences, int64_t length)
      : model(model), tokens(sequences * length), length(length) {
    const int64_t hidden = model.hidden_size;
    weights.input_norm = Ones(hidden);
    weights.query = RandomWeight({query_rows(), hidden});
    weights.key = RandomWeight({kv_rows(), hidden});
    weights.value = RandomWeight({kv_rows(), hidden});
    weights.output = RandomWeight({hidden, query_rows()});
    weights.query_norm = Ones(model.layer(0).attention.head_size);
    weights.key_norm = Ones(model.layer(0).attention.head_size);
    weights.post_norm = Ones(hidden);
    weights.router = RandomWeight({model.expert_count, hidden});
    weights.gate_up = RandomWeight({model.expert_count, 2 * model.expert_width, hidden});
    weights.down = RandomWeight({model.expert_count, hidden, model.expert_width});
    gradients = {.input_norm = Gradient(weights.input_norm),
                 .query = Gradient(weights.query),
                 .key = Gradient(weights.key),
                 .value = Gradient(weights.value),
                 .output = Gradient(weights.output),
                 .query_norm = Gradient(weights.query_norm),
                 .key_norm = Gradient(weights.key_norm),
                 .post_norm = Gradient(weights.post_norm),
                 .router = Gradient(weights.router),
                 .gate_up = Gradient(weights.gate_up),
                 .down = Gradient(weights.down)};
    std::vector<int64_t> starts;
    for (int64_t i = 0; i <= sequences; ++i) starts.push_back(i * length);
    batch = MakePackedBatch(starts);
    // The same tokens in documents of many lengths.
    std::vector<int64_t> packed_starts = {0};
    while (packed_starts.back() < tokens) {
      const int64_t document = 200 + 37 * static_cast<int64_t>(packed_starts.size()) % 3000;
      const int64_t sequence_end = (packed_starts.back() / length + 1) * length;
      packed_starts.push_back(std::min(packed_starts.back() + document, sequence_end));
    }
    packed = MakePackedBatch(packed_starts);
    for (PackedBatch* b : {&batch, &packed}) {
      b->positions = b->positions.to(at::kCUDA);
      b->document_starts = b->document_starts.to(at::kCUDA);
    }
  }

  int64_t query_rows() const { return model.layer(0).attention.query_width(); }
  int64_t kv_rows() const { return model.layer(0).attention.kv_width(); }
  double projection_flops() const {
    return 2.0 * static_cast<double>(tokens * model.hidden_size * 2 * (query_rows() + kv_rows()));
  }
  double attention_flops() const {
    return 2.0 * static_cast<double>(tokens * length * query_rows());
  }
  double gate_up_flops() const {
    return 4.0 * static_cast<double>(tokens * model.experts_per_token * model.hidden_size *
                                     model.expert_width);
  }
  double router_flops() const {
    return 2.0 * static_cast<double>(tokens * model.expert_count * model.hidden_size);
  }

  const ModelDescription model;
  const int64_t tokens;
  const int64_t length;
  LayerTensors weights;
  LayerTensors gradients;
  PackedBatch batch;
  PackedBatch packed;
};

void RunLayer(Bench* bench) {
  const ModelDescription& model = bench->model;
  const LayerTensors& weights = bench->weights;
  const LayerDescription& layer = model.layer(0);
  const double gate_up = bench->gate_up_flops();
  const double projections = bench->projection_flops(), attention = bench->attention_flops();
  const at::Tensor x = RandomRows(bench->tokens, model.hidden_size);
  const at::Tensor dy = RandomRows(bench->tokens, model.hidden_size);
  at::Tensor h;
  Report("forward mixer", projections + attention,
         [&] { h = MixerForward(model, model.layer(0), weights, x, bench->batch, nullptr); });
  Report("forward mixer, packed documents", 0,
         [&] { h = MixerForward(model, model.layer(0), weights, x, bench->packed, nullptr); });
  Report("forward mixture", bench->router_flops() + gate_up * 1.5,
         [&] { MixtureForward(model, layer, weights, h, nullptr); });
  {
    MixtureSaved saved;
    Report("replay mixture", bench->router_flops() + gate_up, [&] {
      saved = {};
      MixtureForward(model, layer, weights, h, &saved, {.stop_at_gate_up = true});
    });
    Report("backward mixture", 2 * bench->router_flops() + gate_up * 3.0,
           [&] { MixtureBackward(model, layer, weights, dy, saved, &bench->gradients); });
  }
  for (const bool packed : {false, true}) {
    const PackedBatch& batch = packed ? bench->packed : bench->batch;
    MixerSaved saved;
    Report(packed ? "replay mixer, packed documents" : "replay mixer",
           packed ? 0 : projections + attention, [&] {
             saved = {};
             h = MixerForward(model, model.layer(0), weights, x, batch, &saved);
           });
    Report(packed ? "backward mixer, packed documents" : "backward mixer",
           packed ? 0 : 2 * projections + 2.5 * attention, [&] {
             MixerBackward(model, model.layer(0), weights, dy, saved, batch, &bench->gradients);
           });
  }
}

void RunHead(const Bench& bench) {
  const ModelDescription& model = bench.model;
  const HeadTensors weights = {.final_norm = Ones(model.hidden_size),
                               .head = RandomWeight({model.vocabulary_size, model.hidden_size})};
  HeadTensors gradients = {.final_norm = Gradient(weights.final_norm),
                           .head = Gradient(weights.head)};
  const at::Tensor x = RandomRows(bench.tokens, model.hidden_size);
  const at::Tensor target = at::randint(model.vocabulary_size, {bench.tokens},
                                        at::TensorOptions(at::kCUDA).dtype(at::kLong));
  const double flops =
      2.0 * static_cast<double>(bench.tokens * model.vocabulary_size * model.hidden_size);
  for (const int64_t chunk : {1024, 4096, 8192, 12288}) {
    const HeadLossOptions options = {.gradient_scale = 1e-4, .chunk_tokens = chunk};
    const std::string name = ", chunks of " + std::to_string(chunk);
    Report("head" + name, 3 * flops,
           [&] { HeadLoss(model, weights, x, target, options, &gradients); });
    Report("evaluation head" + name, flops,
           [&] { HeadLoss(model, weights, x, target, options, nullptr); });
  }
  for (const int64_t chunk : {8192, 12288}) {
    const at::Tensor part = x.narrow(0, 0, chunk), part_target = target.narrow(0, 0, chunk);
    const double part_flops =
        flops * static_cast<double>(chunk) / static_cast<double>(bench.tokens);
    const std::string name = ", " + std::to_string(chunk) + " tokens";
    at::Tensor logits;
    Report("head logits" + name, part_flops, [&] {
      logits.reset();
      logits = at::linear(part, weights.head);
    });
    const at::Tensor loss = at::empty({chunk}, x.options().dtype(at::kFloat));
    Report("head cross entropy" + name, 0, [&] {
      CrossEntropyInPlace({.tokens = chunk, .vocabulary = logits.size(1)},
                          DeviceData<__nv_bfloat16>(logits), DeviceData<int64_t>(part_target), 1.0f,
                          DeviceData<float>(loss), OperatorStream());
    });
    Report("head weight gradient" + name, part_flops,
           [&] { AddWeightGradient(gradients.head, logits, part); });
    Report("head input gradient" + name, part_flops, [&] { at::mm(logits, weights.head); });
  }
  const at::Tensor token = target.to(at::kInt);
  Report("embedding backward by row", 0, [&] { EmbeddingBackwardByRow(x, token); });
}

// What the programs above are made of.
void RunPieces(Bench* bench) {
  const ModelDescription& model = bench->model;
  const LayerTensors& weights = bench->weights;
  const int64_t tokens = bench->tokens, hidden = model.hidden_size;
  const at::Tensor x = RandomRows(tokens, hidden);
  const double of_query =
      2.0 * static_cast<double>(tokens) * static_cast<double>(hidden * bench->query_rows());
  const double of_key =
      2.0 * static_cast<double>(tokens) * static_cast<double>(hidden * bench->kv_rows());
  at::Tensor q = RandomRows(tokens, bench->query_rows());
  at::Tensor k = RandomRows(tokens, bench->kv_rows());
  at::Tensor wide = at::zeros({tokens, hidden}, x.options().dtype(at::kFloat));
  Report("q projection", of_query, [&] { at::linear(x, weights.query); });
  Report("k projection", of_key, [&] { at::linear(x, weights.key); });
  Report("output projection and residual", of_query, [&] { at::addmm(x, q, weights.output.t()); });
  Report("q gradient to input, wide", of_query, [&] { at::mm(q, weights.query, at::kFloat); });
  Report("q gradient to input, BF16", of_query, [&] { at::mm(q, weights.query); });
  Report("k gradient added to input, wide", of_key, [&] { AddWideProduct(wide, k, weights.key); });
  Report("q weight gradient, added wide", of_query,
         [&] { AddWeightGradient(bench->gradients.query, q, x); });
  Report("q weight gradient, BF16", of_query, [&] { at::mm(q.t(), x); });
  Report("k weight gradient, added wide", of_key,
         [&] { AddWeightGradient(bench->gradients.key, k, x); });

  const AttentionDescription& attention = model.layer(0).attention;
  q = q.view({tokens, attention.query_head_count, attention.head_size});
  k = k.view({tokens, attention.kv_head_count, attention.head_size});
  for (const bool packed : {false, true}) {
    const PackedBatch& batch = packed ? bench->packed : bench->batch;
    const std::string name = packed ? ", packed documents" : "";
    const double flops = packed ? 0 : bench->attention_flops();
    AttentionOutput output;
    Report("attention" + name, flops, [&] { output = CudaAttentionForward(q, k, k, batch, {}); });
    Report("attention backward" + name, 2.5 * flops,
           [&] { CudaAttentionBackward(q, q, k, k, output, batch, {}); });
  }
  q.reset();
  k.reset();

  MixtureSaved saved;
  saved.input_TH = x;
  Report("norm", 0, [&] { NormForward(x, weights.post_norm, model.norm); });
  Report("routing", bench->router_flops(),
         [&] { CudaRoute(model, x, weights.router, &saved, nullptr); });
  Report("experts gate/up", bench->gate_up_flops(), [&] {
    saved.gate_up_RF.reset();
    saved.gate_up_RF = CudaExpertsGateUp(x, weights.gate_up, saved.groups);
  });
  Report("experts down", bench->gate_up_flops() / 2,
         [&] { CudaExpertsDown(model, saved, weights.down, CudaCombineWeights(model, saved), x); });
  Report("experts and router backward", 3 * bench->gate_up_flops() + 2 * bench->router_flops(),
         [&] { CudaRoutedBackward(model, weights, x, x, saved, {}, &bench->gradients); });
}

}  // namespace
}  // namespace oom

int main(int argc, char** argv) {
  if (!oom::testing::HasGpu()) return 77;
  // As the worker has it.
  at::globalContext().setAllowBF16ReductionCuBLAS(false, /*allow_splitk=*/true);
  oom::InstallCudaOperators();
  const int64_t sequences = argc > 1 ? std::atoll(argv[1]) : 8;
  const int64_t length = argc > 2 ? std::atoll(argv[2]) : 4096;
  oom::Bench bench(oom::Qwen3(), sequences, length);
  oom::RunLayer(&bench);
  oom::RunHead(bench);
  oom::RunPieces(&bench);
  return 0;
}
