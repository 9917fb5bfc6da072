#include "runtime/model/unit.h"

#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

// All but norms, biases, A_log, dt_bias, convolutions, router scales and scalars (engine rules,
// section 14). By role, never by the number of dimensions.
bool Decayed(TensorRole role) {
  switch (role) {
    case TensorRole::kInputNorm:
    case TensorRole::kQueryNorm:
    case TensorRole::kKeyNorm:
    case TensorRole::kDeltaTaps:
    case TensorRole::kDeltaALog:
    case TensorRole::kDeltaDtBias:
    case TensorRole::kDeltaNorm:
    case TensorRole::kMixerOutputNorm:
    case TensorRole::kPostNorm:
    case TensorRole::kRouterScale:
    case TensorRole::kExpertScale:
    case TensorRole::kDenseOutputNorm:
    case TensorRole::kExpertsNorm:
    case TensorRole::kExpertsOutputNorm:
    case TensorRole::kMixtureOutputNorm:
    case TensorRole::kLayerScale:
    case TensorRole::kFinalNorm:
      return false;
    case TensorRole::kEmbedding:
    case TensorRole::kQuery:
    case TensorRole::kKey:
    case TensorRole::kValue:
    case TensorRole::kOutput:
    case TensorRole::kDeltaMixed:
    case TensorRole::kDeltaGate:
    case TensorRole::kDeltaBeta:
    case TensorRole::kDeltaDecay:
    case TensorRole::kDeltaOutput:
    case TensorRole::kRouter:
    case TensorRole::kSharedGateUp:
    case TensorRole::kSharedDown:
    case TensorRole::kSharedGate:
    case TensorRole::kDenseGateUp:
    case TensorRole::kDenseDown:
    case TensorRole::kExpertsGateUp:
    case TensorRole::kExpertsDown:
    case TensorRole::kHead:
      return true;
  }
  OOM_CHECK_MSG(false, "unknown tensor role");
}

// Adds tensors to one unit and lays them out.
class UnitBuilder {
 public:
  UnitBuilder(UnitKind kind, int64_t layer, std::string name) {
    unit_.kind = kind;
    unit_.layer = layer;
    unit_.name = std::move(name);
  }

  void Add(TensorRole role, const std::string& name, std::vector<int64_t> shape) {
    TensorSpec spec;
    spec.role = role;
    spec.name = name;
    spec.shape = std::move(shape);
    spec.elements = 1;
    for (const int64_t dimension : spec.shape) spec.elements *= dimension;
    spec.offset_elements = RoundUp(end_elements_, kBlockElements);
    spec.decayed = Decayed(role);
    end_elements_ = spec.offset_elements + spec.elements;
    unit_.parameters += spec.elements;
    unit_.tensors.push_back(std::move(spec));
  }

  ParameterUnit Finish(int rank_count) && {
    unit_.elements = RoundUp(end_elements_, kBlockElements * rank_count);
    return std::move(unit_);
  }

 private:
  ParameterUnit unit_;
  int64_t end_elements_ = 0;
};

void AddAttention(const AttentionDescription& attention, int64_t hidden, const std::string& prefix,
                  UnitBuilder* builder) {
  const int64_t query_rows = attention.query_width() * (attention.output_gate ? 2 : 1);
  builder->Add(TensorRole::kQuery, prefix + "query", {query_rows, hidden});
  builder->Add(TensorRole::kKey, prefix + "key", {attention.kv_width(), hidden});
  if (!attention.key_is_value) {
    builder->Add(TensorRole::kValue, prefix + "value", {attention.kv_width(), hidden});
  }
  builder->Add(TensorRole::kOutput, prefix + "output", {hidden, attention.query_width()});
  if (attention.query_key_norm) {
    builder->Add(TensorRole::kQueryNorm, prefix + "query_norm", {attention.head_size});
    builder->Add(TensorRole::kKeyNorm, prefix + "key_norm", {attention.head_size});
  }
}

void AddDeltaNet(const DeltaNetDescription& delta, int64_t hidden, const std::string& prefix,
                 UnitBuilder* builder) {
  const int64_t heads = delta.value_head_count;
  builder->Add(TensorRole::kDeltaMixed, prefix + "delta.mixed", {delta.channel_count(), hidden});
  builder->Add(TensorRole::kDeltaGate, prefix + "delta.gate", {delta.value_width(), hidden});
  builder->Add(TensorRole::kDeltaBeta, prefix + "delta.beta", {heads, hidden});
  builder->Add(TensorRole::kDeltaDecay, prefix + "delta.decay", {heads, hidden});
  builder->Add(TensorRole::kDeltaTaps, prefix + "delta.taps",
               {delta.channel_count(), 1, delta.tap_count});
  builder->Add(TensorRole::kDeltaALog, prefix + "delta.a_log", {heads});
  builder->Add(TensorRole::kDeltaDtBias, prefix + "delta.dt_bias", {heads});
  builder->Add(TensorRole::kDeltaNorm, prefix + "delta.norm", {delta.value_head_size});
  builder->Add(TensorRole::kDeltaOutput, prefix + "delta.output", {hidden, delta.value_width()});
}

// What of the mixture lies in the ordinary unit: all of it but routed experts.
void AddMixture(const ModelDescription& model, MixtureKind kind, const std::string& prefix,
                UnitBuilder* builder) {
  const int64_t hidden = model.hidden_size;
  if (HasExperts(kind)) {
    builder->Add(TensorRole::kRouter, prefix + "router", {model.expert_count, hidden});
  }
  if (kind == MixtureKind::kRoutedAndShared) {
    builder->Add(TensorRole::kSharedGateUp, prefix + "shared.gate_up",
                 {2 * model.shared_width, hidden});
    builder->Add(TensorRole::kSharedDown, prefix + "shared.down", {hidden, model.shared_width});
    builder->Add(TensorRole::kSharedGate, prefix + "shared.gate", {1, hidden});
  }
  if (kind == MixtureKind::kDense || kind == MixtureKind::kRoutedAndDense) {
    builder->Add(TensorRole::kDenseGateUp, prefix + "dense.gate_up",
                 {2 * model.dense_width, hidden});
    builder->Add(TensorRole::kDenseDown, prefix + "dense.down", {hidden, model.dense_width});
  }
  if (kind == MixtureKind::kRoutedAndDense) {
    builder->Add(TensorRole::kRouterScale, prefix + "router_scale", {hidden});
    builder->Add(TensorRole::kExpertScale, prefix + "expert_scale", {model.expert_count});
    builder->Add(TensorRole::kDenseOutputNorm, prefix + "dense.output_norm", {hidden});
    builder->Add(TensorRole::kExpertsNorm, prefix + "experts_norm", {hidden});
    builder->Add(TensorRole::kExpertsOutputNorm, prefix + "experts_output_norm", {hidden});
  }
}

ParameterUnit BuildLayer(const ModelDescription& model, int64_t layer, int rank_count) {
  const std::string name = "layers." + std::to_string(layer);
  const std::string prefix = name + ".";
  const int64_t hidden = model.hidden_size;
  const LayerDescription& description = model.layer(layer);
  UnitBuilder builder(UnitKind::kLayer, layer, name);
  builder.Add(TensorRole::kInputNorm, prefix + "input_norm", {hidden});
  if (description.mixer == MixerKind::kDeltaNet) {
    AddDeltaNet(description.delta_net, hidden, prefix, &builder);
  } else {
    AddAttention(description.attention, hidden, prefix, &builder);
  }
  if (model.branch_norms) {
    builder.Add(TensorRole::kMixerOutputNorm, prefix + "mixer_output_norm", {hidden});
  }
  builder.Add(TensorRole::kPostNorm, prefix + "post_norm", {hidden});
  AddMixture(model, description.mixture, prefix, &builder);
  if (model.branch_norms) {
    builder.Add(TensorRole::kMixtureOutputNorm, prefix + "mixture_output_norm", {hidden});
    builder.Add(TensorRole::kLayerScale, prefix + "layer_scale", {1});
  }
  return std::move(builder).Finish(rank_count);
}

ParameterUnit BuildExperts(const ModelDescription& model, int64_t layer, int rank_count) {
  const std::string name = "layers." + std::to_string(layer) + ".experts";
  const int64_t count = model.expert_count;
  UnitBuilder builder(UnitKind::kExperts, layer, name);
  builder.Add(TensorRole::kExpertsGateUp, name + ".gate_up",
              {count, 2 * model.expert_width, model.hidden_size});
  builder.Add(TensorRole::kExpertsDown, name + ".down",
              {count, model.hidden_size, model.expert_width});
  return std::move(builder).Finish(rank_count);
}

}  // namespace

bool ParameterUnit::has(TensorRole role) const {
  for (const TensorSpec& spec : tensors) {
    if (spec.role == role) return true;
  }
  return false;
}

const TensorSpec& ParameterUnit::tensor(TensorRole role) const {
  for (const TensorSpec& spec : tensors) {
    if (spec.role == role) return spec;
  }
  OOM_CHECK_MSG(false, "the unit has no tensor with this role");
}

std::vector<ParameterUnit> BuildUnits(const ModelDescription& model, int rank_count) {
  OOM_CHECK(rank_count > 0);
  std::vector<ParameterUnit> units;
  UnitBuilder embedding(UnitKind::kEmbedding, -1, "embedding");
  embedding.Add(TensorRole::kEmbedding, "embedding", {model.vocabulary_size, model.hidden_size});
  units.push_back(std::move(embedding).Finish(rank_count));
  for (int64_t layer = 0; layer < model.layer_count(); ++layer) {
    units.push_back(BuildLayer(model, layer, rank_count));
    if (HasExperts(model.layer(layer).mixture)) {
      units.push_back(BuildExperts(model, layer, rank_count));
    }
  }
  UnitBuilder head(UnitKind::kHead, -1, "head");
  head.Add(TensorRole::kFinalNorm, "final_norm", {model.hidden_size});
  if (!model.tied_embedding) {
    head.Add(TensorRole::kHead, "head", {model.vocabulary_size, model.hidden_size});
  }
  units.push_back(std::move(head).Finish(rank_count));
  for (size_t i = 0; i < units.size(); ++i) units[i].index = static_cast<int64_t>(i);
  return units;
}

int64_t ParameterCount(const std::vector<ParameterUnit>& units) {
  int64_t count = 0;
  for (const ParameterUnit& unit : units) count += unit.parameters;
  return count;
}

}  // namespace oom
