#include "runtime/checkpoint/manifest_model.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/checkpoint/json_fields.h"

namespace oom {
namespace {

using Json = nlohmann::json;

template <class T>
struct Named {
  const char* name;
  T value;
};
constexpr Named<Family> kFamilies[] = {{"mixtral", Family::kMixtral},
                                       {"qwen3_moe", Family::kQwen3Moe},
                                       {"qwen3_5_moe", Family::kQwen35Moe},
                                       {"gemma4", Family::kGemma4}};
constexpr Named<MixtureKind> kMixtures[] = {{"routed", MixtureKind::kRoutedExperts},
                                            {"dense", MixtureKind::kDense},
                                            {"routed_shared", MixtureKind::kRoutedAndShared},
                                            {"routed_dense", MixtureKind::kRoutedAndDense}};
constexpr Named<MixerKind> kMixers[] = {{"attention", MixerKind::kAttention},
                                        {"delta_net", MixerKind::kDeltaNet}};
constexpr Named<NormScale> kNormScales[] = {
    {"weight_after_rounding", NormScale::kWeightAfterRounding},
    {"weight", NormScale::kWeight},
    {"one_plus_weight", NormScale::kOnePlusWeight}};
constexpr Named<Activation> kActivations[] = {{"silu", Activation::kSilu},
                                              {"gelu_tanh", Activation::kGeluTanh}};

template <class T, size_t N>
const char* NameOf(const Named<T> (&names)[N], T value) {
  for (const Named<T>& named : names) {
    if (named.value == value) return named.name;
  }
  OOM_CHECK_MSG(false, "unknown value");
}

template <class T, size_t N>
T TakeNamed(const Named<T> (&names)[N], const char* key, Fields* fields) {
  const std::string text = fields->String(key);
  for (const Named<T>& named : names) {
    if (text == named.name) return named.value;
  }
  fields->Fail("has an unknown " + std::string(key) + " \"" + text + "\"");
  return names[0].value;
}

// The fields of a struct, each with the range that keeps products of dimensions within int64.
template <class S>
struct SizeField {
  const char* name;
  int64_t S::*member;
  int64_t minimum, maximum;
};
template <class S>
struct BoolField {
  const char* name;
  bool S::*member;
};
template <class S>
struct RealField {
  const char* name;
  double S::*member;
};

constexpr SizeField<ModelDescription> kModelSizes[] = {
    {"hidden_size", &ModelDescription::hidden_size, 1, 1 << 20},
    {"vocabulary_size", &ModelDescription::vocabulary_size, 1, 1 << 26},
    {"expert_count", &ModelDescription::expert_count, 0, 1 << 16},
    {"experts_per_token", &ModelDescription::experts_per_token, 0, 1 << 16},
    {"expert_width", &ModelDescription::expert_width, 0, 1 << 20},
    {"dense_width", &ModelDescription::dense_width, 0, 1 << 20},
    {"max_positions", &ModelDescription::max_positions, 0, int64_t{1} << 40}};
constexpr BoolField<ModelDescription> kModelFlags[] = {
    {"renormalize_top_k", &ModelDescription::renormalize_top_k},
    {"tied_embedding", &ModelDescription::tied_embedding}};
constexpr RealField<ModelDescription> kModelReals[] = {
    {"initializer_range", &ModelDescription::initializer_range}};

using Attention = AttentionDescription;
constexpr SizeField<Attention> kAttentionSizes[] = {
    {"query_head_count", &Attention::query_head_count, 1, 1 << 14},
    {"kv_head_count", &Attention::kv_head_count, 1, 1 << 14},
    {"head_size", &Attention::head_size, 1, 1 << 14},
    {"sliding_window", &Attention::sliding_window, 0, int64_t{1} << 40}};
constexpr BoolField<Attention> kAttentionFlags[] = {
    {"query_key_norm", &Attention::query_key_norm}};

using Delta = DeltaNetDescription;
constexpr SizeField<Delta> kDeltaSizes[] = {
    {"key_head_count", &Delta::key_head_count, 1, 1 << 14},
    {"value_head_count", &Delta::value_head_count, 1, 1 << 14},
    {"key_head_size", &Delta::key_head_size, 1, 1 << 14},
    {"value_head_size", &Delta::value_head_size, 1, 1 << 14},
    {"tap_count", &Delta::tap_count, 1, 1 << 8}};

// What the first two families lack: their manifests have no key for it.
constexpr SizeField<ModelDescription> kMoreModelSizes[] = {
    {"shared_width", &ModelDescription::shared_width, 0, 1 << 20}};
constexpr BoolField<ModelDescription> kMoreModelFlags[] = {
    {"branch_norms", &ModelDescription::branch_norms}};
constexpr RealField<ModelDescription> kMoreModelReals[] = {
    {"embedding_scale", &ModelDescription::embedding_scale},
    {"logit_cap", &ModelDescription::logit_cap}};
constexpr BoolField<Attention> kMoreAttentionFlags[] = {
    {"value_norm", &Attention::value_norm},
    {"key_is_value", &Attention::key_is_value},
    {"output_gate", &Attention::output_gate}};
constexpr RealField<Attention> kMoreAttentionReals[] = {{"score_scale", &Attention::score_scale}};
constexpr SizeField<RotaryRule> kRotarySizes[] = {{"size", &RotaryRule::size, 2, 1 << 14},
                                                  {"pair_count", &RotaryRule::pair_count, 1, 1 << 13}};

template <class S, class List>
void Put(const S& from, const List& list, Json* json) {
  for (const auto& field : list) (*json)[field.name] = from.*field.member;
}
template <class S, size_t N>
void Take(const SizeField<S> (&list)[N], Fields* fields, S* to) {
  for (const auto& field : list) {
    to->*field.member = fields->Integer(field.name, field.minimum, field.maximum);
  }
}
template <class S, size_t N>
void Take(const BoolField<S> (&list)[N], Fields* fields, S* to) {
  for (const auto& field : list) to->*field.member = fields->Bool(field.name);
}
template <class S, size_t N>
void Take(const RealField<S> (&list)[N], Fields* fields, S* to) {
  for (const auto& field : list) to->*field.member = fields->Real(field.name);
}

// Whether one attention and two kinds of mixture say all, as in the first manifests.
bool IsPlain(Family family) { return family == Family::kMixtral || family == Family::kQwen3Moe; }

Json YarnJson(const YarnScaling& yarn) {
  return {{"factor", yarn.factor},
          {"original_positions", yarn.original_positions},
          {"beta_fast", yarn.beta_fast},
          {"beta_slow", yarn.beta_slow},
          {"attention_factor", yarn.attention_factor},
          {"truncate", yarn.truncate}};
}

Status ParseYarn(const Json& json, const std::string& where, std::optional<YarnScaling>* yarn) {
  Fields fields(&json, where);
  *yarn =
      YarnScaling{.factor = fields.Real("factor"),
                  .original_positions = fields.Integer("original_positions", 1, kMostYarnPositions),
                  .beta_fast = fields.Real("beta_fast"),
                  .beta_slow = fields.Real("beta_slow"),
                  .attention_factor = fields.Real("attention_factor"),
                  .truncate = fields.Bool("truncate")};
  return fields.Finish();
}

Json LayerJson(const LayerDescription& layer) {
  Json json = {{"mixer", NameOf(kMixers, layer.mixer)},
               {"mixture", NameOf(kMixtures, layer.mixture)}};
  if (layer.mixer == MixerKind::kDeltaNet) {
    Put(layer.delta_net, kDeltaSizes, &json);
    return json;
  }
  const AttentionDescription& attention = layer.attention;
  Put(attention, kAttentionSizes, &json);
  Put(attention, kAttentionFlags, &json);
  Put(attention, kMoreAttentionFlags, &json);
  Put(attention, kMoreAttentionReals, &json);
  Json rotary = {{"theta", attention.rotary.theta}};
  Put(attention.rotary, kRotarySizes, &rotary);
  if (attention.rotary.yarn) rotary["yarn"] = YarnJson(*attention.rotary.yarn);
  json["rotary"] = std::move(rotary);
  return json;
}

Status ParseLayer(const Json& json, const std::string& where, LayerDescription* layer) {
  Fields fields(&json, where);
  layer->mixer = TakeNamed(kMixers, "mixer", &fields);
  layer->mixture = TakeNamed(kMixtures, "mixture", &fields);
  if (layer->mixer == MixerKind::kDeltaNet) {
    Take(kDeltaSizes, &fields, &layer->delta_net);
    return fields.Finish();
  }
  AttentionDescription& attention = layer->attention;
  Take(kAttentionSizes, &fields, &attention);
  Take(kAttentionFlags, &fields, &attention);
  Take(kMoreAttentionFlags, &fields, &attention);
  Take(kMoreAttentionReals, &fields, &attention);
  if (const Json* rotary = fields.Take("rotary"); rotary != nullptr) {
    Fields of_rotary(rotary, where + ": rotary");
    attention.rotary.theta = of_rotary.Real("theta");
    Take(kRotarySizes, &of_rotary, &attention.rotary);
    if (const Json* yarn = of_rotary.TakeOptional("yarn"); yarn != nullptr) {
      OOM_RETURN_IF_ERROR(ParseYarn(*yarn, where + ": yarn", &attention.rotary.yarn));
    }
    OOM_RETURN_IF_ERROR(of_rotary.Finish());
  }
  return fields.Finish();
}

void PutPlainLayers(const ModelDescription& model, Json* json) {
  const AttentionDescription& attention = model.layers.front().attention;
  Put(attention, kAttentionSizes, json);
  Put(attention, kAttentionFlags, json);
  (*json)["rms_epsilon"] = model.norm.epsilon;
  (*json)["rope_theta"] = attention.rotary.theta;
  (*json)["layer_count"] = model.layer_count();
  Json mixtures = Json::array();
  for (const LayerDescription& layer : model.layers) {
    mixtures.push_back(NameOf(kMixtures, layer.mixture));
  }
  (*json)["mixtures"] = std::move(mixtures);
  // Only where there is one: manifests of before it had no key.
  if (attention.rotary.yarn) (*json)["yarn"] = YarnJson(*attention.rotary.yarn);
}

Status TakePlainLayers(const std::string& where, Fields* fields, ModelDescription* model) {
  LayerDescription layer;
  Take(kAttentionSizes, fields, &layer.attention);
  Take(kAttentionFlags, fields, &layer.attention);
  model->norm.epsilon = fields->Real("rms_epsilon");
  layer.attention.rotary = {.theta = fields->Real("rope_theta"),
                            .size = layer.attention.head_size,
                            .pair_count = layer.attention.head_size / 2};
  if (const Json* yarn = fields->TakeOptional("yarn"); yarn != nullptr) {
    OOM_RETURN_IF_ERROR(ParseYarn(*yarn, where + ": yarn", &layer.attention.rotary.yarn));
  }
  const int64_t layer_count = fields->Integer("layer_count", 1, 1 << 12);
  const Json* mixtures = fields->Array("mixtures");
  if (mixtures == nullptr) return Status::Ok();
  for (const Json& kind : *mixtures) {
    const bool routed = kind == "routed";
    if (!routed && kind != "dense") fields->Fail("has an unknown mixture");
    layer.mixture = routed ? MixtureKind::kRoutedExperts : MixtureKind::kDense;
    model->layers.push_back(layer);
  }
  if (model->layer_count() != layer_count) {
    fields->Fail("has " + std::to_string(model->layer_count()) + " mixtures for " +
                 std::to_string(layer_count) + " layers");
  }
  return Status::Ok();
}

// The kinds of layers, and each layer's number in that list.
void PutLayers(const ModelDescription& model, Json* json) {
  std::vector<LayerDescription> kinds;
  Json layers = Json::array();
  for (const LayerDescription& layer : model.layers) {
    auto found = std::find(kinds.begin(), kinds.end(), layer);
    if (found == kinds.end()) found = kinds.insert(kinds.end(), layer);
    layers.push_back(std::distance(kinds.begin(), found));
  }
  Json described = Json::array();
  for (const LayerDescription& kind : kinds) described.push_back(LayerJson(kind));
  (*json)["layer_kinds"] = std::move(described);
  (*json)["layers"] = std::move(layers);
  (*json)["norm_epsilon"] = model.norm.epsilon;
  (*json)["norm_scale"] = NameOf(kNormScales, model.norm.scale);
  (*json)["activation"] = NameOf(kActivations, model.activation);
  Put(model, kMoreModelSizes, json);
  Put(model, kMoreModelFlags, json);
  Put(model, kMoreModelReals, json);
}

Status TakeLayers(const std::string& where, Fields* fields, ModelDescription* model) {
  std::vector<LayerDescription> kinds;
  if (const Json* described = fields->Array("layer_kinds"); described != nullptr) {
    for (const Json& kind : *described) {
      OOM_RETURN_IF_ERROR(ParseLayer(kind, where + ": layer_kinds", &kinds.emplace_back()));
    }
  }
  if (const Json* layers = fields->Array("layers"); layers != nullptr) {
    for (const Json& layer : *layers) {
      if (!layer.is_number_unsigned() || layer.get<uint64_t>() >= kinds.size()) {
        fields->Fail("has a layer of no kind");
        return fields->Finish();
      }
      model->layers.push_back(kinds[layer.get<uint64_t>()]);
    }
    if (model->layers.empty() || model->layer_count() > 1 << 12) {
      fields->Fail("has " + std::to_string(model->layer_count()) + " layers");
    }
  }
  model->norm.epsilon = fields->Real("norm_epsilon");
  model->norm.scale = TakeNamed(kNormScales, "norm_scale", fields);
  model->activation = TakeNamed(kActivations, "activation", fields);
  Take(kMoreModelSizes, fields, model);
  Take(kMoreModelFlags, fields, model);
  Take(kMoreModelReals, fields, model);
  return Status::Ok();
}

}  // namespace

Json ModelJson(const ModelDescription& model) {
  Json json = {{"family", NameOf(kFamilies, model.family)}};
  Put(model, kModelSizes, &json);
  Put(model, kModelFlags, &json);
  Put(model, kModelReals, &json);
  if (IsPlain(model.family)) {
    PutPlainLayers(model, &json);
  } else {
    PutLayers(model, &json);
  }
  return json;
}

Status ParseModelJson(const Json& json, const std::string& where, ModelDescription* model) {
  Fields fields(&json, where);
  model->family = TakeNamed(kFamilies, "family", &fields);
  Take(kModelSizes, &fields, model);
  Take(kModelFlags, &fields, model);
  Take(kModelReals, &fields, model);
  OOM_RETURN_IF_ERROR(IsPlain(model->family) ? TakePlainLayers(where, &fields, model)
                                             : TakeLayers(where, &fields, model));
  return fields.Finish();
}

}  // namespace oom
