#include "tests/gpu/ops/cuda_ops_testing.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <tuple>

#include "runtime/ops/cuda/cuda_operators.h"
#include "runtime/ops/rms_norm.h"

namespace oom::testing {
namespace {

// None of it needs a GPU, so it may come before what ends the program where there is none.
class OperatorSettings : public ::testing::Environment {
 public:
  void SetUp() override {
    // What deterministic mode demands, before cuBLAS starts.
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/1);
    // As the worker has it.
    at::globalContext().setAllowBF16ReductionCuBLAS(false, /*allow_splitk=*/true);
    InstallCudaOperators();
    // Of the CPU's results: more threads than cores that are free spin.
    at::set_num_threads(4);
  }
};

const auto* const kOperatorSettings = ::testing::AddGlobalTestEnvironment(new OperatorSettings);

at::Tensor RelativeSize(const at::Tensor& difference, const at::Tensor& exact) {
  const at::Tensor size = exact.norm();
  return difference.norm().div(at::where(size.eq(0.0), at::ones_like(size), size));
}

double Error(const at::Tensor& actual, const at::Tensor& exact) {
  const at::Tensor wide = actual.to(at::TensorOptions(at::kCPU).dtype(at::kDouble));
  return RelativeSize(wide.sub(exact), exact).item<double>();
}

}  // namespace

std::vector<NamedModel> SmallCudaModels() {
  ModelDescription qwen;
  qwen.family = Family::kQwen3Moe;
  qwen.hidden_size = 96;
  qwen.expert_count = 11;
  qwen.experts_per_token = 3;
  qwen.expert_width = 40;
  qwen.dense_width = 56;
  qwen.vocabulary_size = 1000;
  qwen.layers.resize(1);
  qwen.layers[0].attention = {.query_head_count = 4,
                              .kv_head_count = 2,
                              .head_size = 128,
                              .query_key_norm = true,
                              .rotary = {.theta = 1e4, .size = 128, .pair_count = 64}};
  ModelDescription unnormalized = qwen;
  unnormalized.renormalize_top_k = false;
  ModelDescription yarn = qwen;
  yarn.set_yarn(MakeYarn(/*factor=*/4.0, /*original_positions=*/512));
  ModelDescription mixtral = qwen;
  mixtral.family = Family::kMixtral;
  mixtral.layers[0].attention = {.query_head_count = 6,
                                 .kv_head_count = 2,
                                 .head_size = 64,
                                 .rotary = {.theta = 1e4, .size = 64, .pair_count = 32}};
  mixtral.norm.epsilon = 1e-5;
  mixtral.expert_count = 8;
  mixtral.experts_per_token = 2;
  ModelDescription windowed = mixtral;
  windowed.layers[0].attention.sliding_window = 37;
  ModelDescription qwen_3_5 = qwen;
  qwen_3_5.family = Family::kQwen35Moe;
  qwen_3_5.norm.scale = NormScale::kOnePlusWeight;
  qwen_3_5.shared_width = 24;
  qwen_3_5.layers[0].mixture = MixtureKind::kRoutedAndShared;
  qwen_3_5.layers[0].attention = {.query_head_count = 4,
                                  .kv_head_count = 2,
                                  .head_size = 256,
                                  .query_key_norm = true,
                                  .output_gate = true,
                                  .rotary = {.theta = 1e4, .size = 64, .pair_count = 32}};
  ModelDescription gemma = qwen;
  gemma.family = Family::kGemma4;
  gemma.norm.scale = NormScale::kWeight;
  gemma.branch_norms = true;
  gemma.activation = Activation::kGeluTanh;
  gemma.logit_cap = 2.0;
  gemma.layers[0].mixture = MixtureKind::kRoutedAndDense;
  gemma.layers[0].attention = {.query_head_count = 4,
                               .kv_head_count = 2,
                               .head_size = 256,
                               .query_key_norm = true,
                               .value_norm = true,
                               .score_scale = 0.1,
                               .sliding_window = 37,
                               .rotary = {.theta = 1e4, .size = 256, .pair_count = 128}};
  ModelDescription global = gemma;
  global.layers[0].attention = {.query_head_count = 4,
                                .kv_head_count = 2,
                                .head_size = 512,
                                .query_key_norm = true,
                                .value_norm = true,
                                .key_is_value = true,
                                .score_scale = 0.1,
                                .rotary = {.theta = 1e4, .size = 512, .pair_count = 64}};
  return {{"qwen3", qwen},
          {"qwen3_unnormalized", unnormalized},
          {"qwen3_yarn", yarn},
          {"mixtral", mixtral},
          {"mixtral_window", windowed},
          {"qwen3_5", qwen_3_5},
          {"gemma4", gemma},
          {"gemma4_global", global}};
}

ModelDescription SmallDeltaModel() {
  ModelDescription model;
  model.family = Family::kQwen35Moe;
  model.hidden_size = 96;
  model.norm.scale = NormScale::kOnePlusWeight;
  model.layers.resize(1);
  model.layers[0].mixer = MixerKind::kDeltaNet;
  model.layers[0].delta_net = {.key_head_count = 2,
                               .value_head_count = 4,
                               .key_head_size = 128,
                               .value_head_size = 128,
                               .tap_count = 4};
  return model;
}

std::vector<std::pair<std::string, std::vector<int64_t>>> Batches() {
  return {{"whole sequences", {0, 160, 320}}, {"packed documents", {0, 1, 30, 30, 158, 159, 320}}};
}

LayerTensors Moved(const LayerTensors& tensors, at::TensorOptions options) {
  LayerTensors moved;
  for (const auto& [name, field] : LayerFields()) {
    if ((tensors.*field).defined()) moved.*field = (tensors.*field).to(options);
  }
  return moved;
}

PackedBatch OnGpu(PackedBatch batch) {
  batch.positions = batch.positions.to(at::kCUDA);
  batch.document_starts = batch.document_starts.to(at::kCUDA);
  return batch;
}

Setting Gpu() { return {at::TensorOptions(at::kCUDA).dtype(at::kBFloat16)}; }
Setting Composite() { return {at::TensorOptions(at::kCPU).dtype(at::kBFloat16)}; }
Setting Exact() { return {at::TensorOptions(at::kCPU).dtype(at::kDouble)}; }

at::Tensor RowsOfClearChoice(const ModelDescription& model, const LayerTensors& weights,
                             int64_t rows, uint64_t seed) {
  const at::Tensor candidates = Random({20 * rows, model.hidden_size}, seed, at::kBFloat16);
  const bool scaled = weights.router_scale.defined();
  const at::Tensor& weight = scaled ? weights.router_scale : weights.post_norm;
  at::Tensor normed =
      RmsNormForward(candidates.to(at::kDouble), weight.to(at::kDouble), model.norm);
  if (scaled) normed.div_(std::sqrt(static_cast<double>(model.hidden_size)));
  const at::Tensor logits = at::linear(normed, weights.router.to(at::kDouble));
  const at::Tensor largest = std::get<0>(at::topk(logits, model.experts_per_token + 1, 1));
  const at::Tensor margin = largest.select(1, model.experts_per_token - 1)
                                .sub(largest.select(1, model.experts_per_token));
  const at::Tensor clear = margin.gt(0.1).nonzero().squeeze(1);
  TORCH_CHECK(clear.size(0) >= rows);
  return candidates.index_select(0, clear.narrow(0, 0, rows));
}

Comparison::~Comparison() {
  Squares all;
  for (const auto& [what, squares] : by_result_) {
    const double of_gpu = std::sqrt(squares.gpu / static_cast<double>(squares.count));
    const double of_composite = std::sqrt(squares.composite / static_cast<double>(squares.count));
    // Written so that NaN fails, here and below.
    EXPECT_TRUE(of_gpu <= 3.0 * of_composite + 1e-6)
        << name_ << " " << what << ": error " << of_gpu << " against the composite's " << of_composite;
    all.gpu += squares.gpu;
    all.composite += squares.composite;
  }
  const double gpu = std::sqrt(all.gpu), composite = std::sqrt(all.composite);
  EXPECT_TRUE(gpu <= 1.5 * composite)
      << name_ << ": error " << gpu << " against the composite's " << composite;
  std::printf("%s: errors %.2f times the composite's\n", name_.c_str(), gpu / composite);
  std::fflush(stdout);  // A program that ends in a check says how far it got.
}

void Comparison::Add(const std::string& what, const at::Tensor& gpu, const at::Tensor& composite,
                     const at::Tensor& exact) {
  ASSERT_TRUE(gpu.defined() && exact.defined()) << name_ << " " << what;
  ASSERT_EQ(gpu.sizes(), exact.sizes()) << name_ << " " << what;
  const double of_gpu = Error(gpu, exact);
  const double of_composite = Error(composite, exact);
  Squares& squares = by_result_[what];
  squares.gpu += of_gpu * of_gpu;
  squares.composite += of_composite * of_composite;
  ++squares.count;
}

void Comparison::Add(const LayerTensors& gpu, const LayerTensors& composite,
                     const LayerTensors& exact) {
  for (const auto& [name, field] : LayerFields()) {
    if (!(exact.*field).defined()) continue;
    Add("d" + name, gpu.*field, composite.*field, exact.*field);
  }
}

}  // namespace oom::testing
