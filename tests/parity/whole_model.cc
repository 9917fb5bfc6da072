#include "tests/parity/whole_model.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "runtime/ops/layer.h"

namespace oom::testing {
namespace {

// Where a tensor of a layer's units belongs; null for the other units' tensors.
at::Tensor LayerTensors::*Field(TensorRole role) {
  switch (role) {
    case TensorRole::kInputNorm:
      return &LayerTensors::input_norm;
    case TensorRole::kQuery:
      return &LayerTensors::query;
    case TensorRole::kKey:
      return &LayerTensors::key;
    case TensorRole::kValue:
      return &LayerTensors::value;
    case TensorRole::kOutput:
      return &LayerTensors::output;
    case TensorRole::kQueryNorm:
      return &LayerTensors::query_norm;
    case TensorRole::kKeyNorm:
      return &LayerTensors::key_norm;
    case TensorRole::kPostNorm:
      return &LayerTensors::post_norm;
    case TensorRole::kRouter:
      return &LayerTensors::router;
    case TensorRole::kDenseGateUp:
    case TensorRole::kExpertsGateUp:
      return &LayerTensors::gate_up;
    case TensorRole::kDenseDown:
    case TensorRole::kExpertsDown:
      return &LayerTensors::down;
    case TensorRole::kEmbedding:
    case TensorRole::kFinalNorm:
    case TensorRole::kHead:
      return nullptr;
  }
  OOM_CHECK(false);
}

class Runner {
 public:
  Runner(const GoldenCase& golden, const RunOptions& options)
      : golden_(golden),
        model_(golden.model),
        options_(options),
        batch_(MakePackedBatch(golden.cu_seqlens)),
        weights_(golden.model.layers.size()),
        gradients_(golden.model.layers.size()),
        layers_(golden.model.layers.size()) {
    for (const ParameterUnit& unit : golden.units) {
      for (const TensorSpec& spec : unit.tensors) {
        const at::Tensor weight = golden.masters.at(spec.name).to(options.type);
        const at::Tensor gradient = at::zeros_like(golden.masters.at(spec.name));
        result_.gradients[spec.name] = gradient;
        if (at::Tensor LayerTensors::*field = Field(spec.role)) {
          weights_[static_cast<size_t>(unit.layer)].*field = weight;
          gradients_[static_cast<size_t>(unit.layer)].*field = gradient;
        } else {
          outer_weights_[spec.name] = weight;
        }
      }
    }
    const std::string head = model_.tied_embedding ? "embedding" : "head";
    head_weights_ = {outer_weights_.at("final_norm"), outer_weights_.at(head)};
    head_gradients_ = {result_.gradients.at("final_norm"), result_.gradients.at(head)};
  }

  RunResult Run() {
    const at::Tensor embedding = outer_weights_.at("embedding");
    at::Tensor x = EmbeddingForward(embedding, golden_.token_T);
    for (size_t layer = 0; layer < layers_.size(); ++layer) x = LayerForward(layer, x);

    result_.logits_TV = HeadLogits(model_, head_weights_, x);
    const double valid = static_cast<double>(golden_.target_T.ge(0).sum().item<int64_t>());
    const HeadLossResult head =
        HeadLoss(model_, head_weights_, x, golden_.target_T,
                 {.gradient_scale = 1.0 / valid, .chunk_tokens = options_.head_chunk_tokens},
                 &head_gradients_);
    result_.loss = head.loss_sum.item<double>() / valid;
    result_.auxiliary_loss = LoadBalanceLoss(stats_).item<double>();
    balance_ = MakeLoadBalanceTerm(stats_, golden_.auxiliary_coefficient);

    at::Tensor dx = head.dx_TH;
    for (size_t layer = layers_.size(); layer-- > 0;) dx = LayerBackward(layer, dx);
    EmbeddingBackward(dx, golden_.token_T, result_.gradients.at("embedding"));
    return std::move(result_);
  }

 private:
  struct LayerState {
    at::Tensor boundary;
    std::vector<MixerSaved> mixers;
    std::vector<MixtureSaved> mixtures;
  };

  at::Tensor Mixer(size_t layer, const at::Tensor& x) {
    LayerState& state = layers_[layer];
    state.mixers.assign(static_cast<size_t>(options_.head_groups), {});
    if (options_.head_groups == 1) {
      return MixerForward(model_, model_.layers[layer], weights_[layer], x, batch_,
                          &state.mixers[0]);
    }
    const int64_t heads = model_.layers[layer].attention.query_head_count / options_.head_groups;
    at::Tensor sum = at::zeros_like(x, at::kFloat);
    for (int64_t group = 0; group < options_.head_groups; ++group) {
      sum.add_(MixerForward(model_, model_.layers[layer], weights_[layer], x, batch_,
                            &state.mixers[static_cast<size_t>(group)],
                            {.first = group * heads, .count = heads}));
    }
    return FinishMixer(x, sum);
  }

  // The whole y, or undefined when replaying.
  at::Tensor Mixture(size_t layer, const at::Tensor& h, bool replay) {
    LayerState& state = layers_[layer];
    const LayerDescription& description = model_.layers[layer];
    const int64_t tokens = h.size(0);
    const int64_t chunk =
        options_.mixture_chunk_tokens == 0 ? tokens : options_.mixture_chunk_tokens;
    state.mixtures.clear();
    std::vector<at::Tensor> parts;
    for (int64_t first = 0; first < tokens; first += chunk) {
      state.mixtures.emplace_back();
      parts.push_back(
          MixtureForward(model_, description, weights_[layer], h, &state.mixtures.back(),
                         {.stop_at_gate_up = replay,
                          .tokens = {.first = first, .count = std::min(chunk, tokens - first)},
                          .stats = replay ? nullptr : &stats_}));
    }
    return replay ? at::Tensor() : at::cat(parts);
  }

  at::Tensor LayerForward(size_t layer, const at::Tensor& x) {
    const at::Tensor h = Mixer(layer, x);
    const at::Tensor y = Mixture(layer, h, /*replay=*/false);
    LayerState& state = layers_[layer];
    if (HasExperts(model_.layers[layer].mixture)) {
      std::vector<at::Tensor> chosen;
      for (const MixtureSaved& part : state.mixtures) chosen.push_back(part.router.expert_TK);
      result_.chosen_experts.push_back(std::get<0>(at::cat(chosen).sort(1)));
    }
    if (options_.replay) {
      state.mixers.clear();
      state.mixtures.clear();
      state.boundary = x;
    }
    return y;
  }

  at::Tensor LayerBackward(size_t layer, const at::Tensor& dy) {
    LayerState& state = layers_[layer];
    if (options_.replay) Mixture(layer, Mixer(layer, state.boundary), /*replay=*/true);
    std::vector<at::Tensor> parts;
    for (const MixtureSaved& part : state.mixtures) {
      parts.push_back(MixtureBackward(model_, model_.layers[layer], weights_[layer], dy, part,
                                      &gradients_[layer], balance_));
    }
    const at::Tensor dh = at::cat(parts);
    if (state.mixers.size() == 1) {
      return MixerBackward(model_, model_.layers[layer], weights_[layer], dh, state.mixers[0],
                           batch_, &gradients_[layer]);
    }
    at::Tensor sum = at::zeros_like(dh, at::kFloat);
    for (const MixerSaved& part : state.mixers) {
      sum.add_(MixerBackward(model_, model_.layers[layer], weights_[layer], dh, part, batch_,
                             &gradients_[layer]));
    }
    return FinishMixer(dh, sum);
  }

  const GoldenCase& golden_;
  const ModelDescription& model_;
  const RunOptions options_;
  const PackedBatch batch_;
  std::vector<LayerTensors> weights_;
  std::vector<LayerTensors> gradients_;
  TensorsByName outer_weights_;
  HeadTensors head_weights_;
  HeadTensors head_gradients_;
  std::vector<LayerState> layers_;
  RouterStats stats_;
  LoadBalanceTerm balance_;
  RunResult result_;
};

}  // namespace

RunResult RunModel(const GoldenCase& golden, const RunOptions& options) {
  return Runner(golden, options).Run();
}

}  // namespace oom::testing
