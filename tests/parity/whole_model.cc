#include "tests/parity/whole_model.h"

#include <tuple>
#include <utility>

#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "worker/layer_program.h"
#include "worker/unit_views.h"

namespace oom::testing {
namespace {

v1::OperatorPartitions Partitions(const RunOptions& options) {
  v1::OperatorPartitions partitions;
  partitions.set_attention_head_group_count(static_cast<int32_t>(options.head_groups));
  partitions.set_attention_sub_batch_tokens(options.sub_batch_tokens);
  partitions.set_recurrent_segment_tokens(options.segment_tokens);
  partitions.set_mixture_chunk_tokens(options.mixture_chunk_tokens);
  return partitions;
}

// The memory of one unit's tensors, as a window or a gradient buffer has them.
struct UnitMemory {
  at::Tensor weights;
  at::Tensor gradients;  // Wide, zeros.

  static std::byte* Base(const at::Tensor& memory) {
    return static_cast<std::byte*>(memory.data_ptr());
  }
};

class Runner {
 public:
  Runner(const GoldenCase& golden, const RunOptions& options)
      : golden_(golden),
        model_(golden.model),
        options_(options),
        program_(&golden.model, Partitions(options)),
        batch_(MakePackedBatch(golden.cu_seqlens)),
        layers_(golden.model.layers.size()) {
    for (const ParameterUnit& unit : golden.units) AddUnit(unit);
    for (const ParameterUnit& unit : golden.units) {
      if (unit.kind != UnitKind::kLayer) continue;
      const bool routed = HasExperts(model_.layer(unit.layer).mixture);
      const ParameterUnit& mixture = routed ? golden.units[static_cast<size_t>(unit.index) + 1] : unit;
      weights_.push_back(Views(unit, mixture, &UnitMemory::weights));
      gradients_.push_back(Views(unit, mixture, &UnitMemory::gradients));
    }
    const ParameterUnit& head = golden.units.back();
    head_weights_ = HeadViews(head, Base(head, &UnitMemory::weights), Options(&UnitMemory::weights));
    head_gradients_ =
        HeadViews(head, Base(head, &UnitMemory::gradients), Options(&UnitMemory::gradients));
    embedding_ = Embedding(&UnitMemory::weights);
    if (model_.tied_embedding) {
      head_weights_.head = embedding_;
      head_gradients_.head = Embedding(&UnitMemory::gradients);
    }
  }

  RunResult Run() {
    const double scale = EmbeddingScale(model_, options_.type);
    at::Tensor x = EmbeddingForward(embedding_, golden_.token_T).mul_(scale);
    for (int64_t layer = 0; layer < model_.layer_count(); ++layer) x = LayerForward(layer, x);

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
    for (int64_t layer = model_.layer_count(); layer-- > 0;) dx = LayerBackward(layer, dx);
    EmbeddingBackward(dx.mul(scale), golden_.token_T, result_.gradients.at("embedding"));
    return std::move(result_);
  }

 private:
  using Memory = at::Tensor UnitMemory::*;

  void AddUnit(const ParameterUnit& unit) {
    UnitMemory memory{.weights = at::zeros({unit.elements}, options_.type),
                      .gradients = at::zeros({unit.elements}, at::kFloat)};
    for (const TensorSpec& spec : unit.tensors) {
      const auto part = [&](const at::Tensor& all) {
        return all.narrow(0, spec.offset_elements, spec.elements).view(spec.shape);
      };
      part(memory.weights).copy_(golden_.masters.at(spec.name));
      result_.gradients[spec.name] = part(memory.gradients);
    }
    units_.push_back(std::move(memory));
  }

  at::TensorOptions Options(Memory memory) const {
    return (units_.front().*memory).options();
  }
  std::byte* Base(const ParameterUnit& unit, Memory memory) const {
    return UnitMemory::Base(units_[static_cast<size_t>(unit.index)].*memory);
  }
  LayerTensors Views(const ParameterUnit& ordinary, const ParameterUnit& mixture,
                     Memory memory) const {
    return LayerViews(ordinary, Base(ordinary, memory), mixture, Base(mixture, memory),
                      Options(memory));
  }
  at::Tensor Embedding(Memory memory) const {
    const ParameterUnit& unit = golden_.units.front();
    return UnitView(unit, TensorRole::kEmbedding, Base(unit, memory), Options(memory));
  }

  at::Tensor LayerForward(int64_t layer, const at::Tensor& x) {
    LayerSaved& saved = layers_[static_cast<size_t>(layer)];
    const LayerTensors& weights = weights_[static_cast<size_t>(layer)];
    const at::Tensor h = program_.ForwardMixer(layer, weights, x, batch_, &saved.mixer);
    const at::Tensor y = program_.ForwardMixture(layer, weights, h, &saved.mixture,
                                                 /*replay=*/false, &stats_);
    if (HasExperts(model_.layer(layer).mixture)) {
      std::vector<at::Tensor> chosen;
      for (const MixtureSaved& part : saved.mixture) chosen.push_back(part.router.expert_TK);
      result_.chosen_experts.push_back(std::get<0>(at::cat(chosen).sort(1)));
    }
    if (options_.replay) {
      saved = {};
      boundaries_.push_back(x);
    }
    return y;
  }

  at::Tensor LayerBackward(int64_t layer, const at::Tensor& dy) {
    LayerSaved& saved = layers_[static_cast<size_t>(layer)];
    const LayerTensors& weights = weights_[static_cast<size_t>(layer)];
    LayerTensors& gradients = gradients_[static_cast<size_t>(layer)];
    if (options_.replay) {
      const at::Tensor h = program_.ForwardMixer(
          layer, weights, boundaries_[static_cast<size_t>(layer)], batch_, &saved.mixer);
      program_.ForwardMixture(layer, weights, h, &saved.mixture, /*replay=*/true, nullptr);
    }
    const at::Tensor dh =
        program_.BackwardMixture(layer, weights, dy, saved.mixture, balance_, &gradients);
    return program_.BackwardMixer(layer, weights, dh, saved.mixer, batch_, &gradients);
  }

  const GoldenCase& golden_;
  const ModelDescription& model_;
  const RunOptions options_;
  const LayerProgram program_;
  const PackedBatch batch_;
  std::vector<UnitMemory> units_;
  std::vector<LayerTensors> weights_;
  std::vector<LayerTensors> gradients_;
  at::Tensor embedding_;
  HeadTensors head_weights_;
  HeadTensors head_gradients_;
  std::vector<LayerSaved> layers_;
  std::vector<at::Tensor> boundaries_;
  RouterStats stats_;
  LoadBalanceTerm balance_;
  RunResult result_;
};

}  // namespace

RunResult RunModel(const GoldenCase& golden, const RunOptions& options) {
  return Runner(golden, options).Run();
}

}  // namespace oom::testing
