#include "runtime/model/family_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "runtime/model/rope_config.h"

namespace oom {
namespace {

using nlohmann::json;

constexpr int64_t kHeadLimit = 1 << 16;
constexpr int64_t kPositionLimit = std::numeric_limits<int32_t>::max();

// What every family has.
int64_t ReadShared(ConfigReader& reader, ModelDescription* model) {
  model->hidden_size = reader.Count("hidden_size", std::nullopt);
  model->vocabulary_size = reader.Count("vocab_size", std::nullopt);
  model->initializer_range = reader.Positive("initializer_range", 0.02);
  // Features of these architectures, and of configurations like theirs, that would change the numbers.
  reader.RefuseUnless("attention_bias", {false});
  reader.RefuseUnless("mlp_bias", {false});
  reader.RefuseUnless("attention_dropout", {0});
  reader.RefuseUnless("hidden_dropout", {0});
  reader.RefuseUnless("router_jitter_noise", {0});
  reader.RefuseUnless("quantization_config", {});
  // What files, tokenizers, generation and other tools read. The job's `router.auxiliary_loss` decides over the
  // router's loss, training over caches and dtypes.
  reader.Ignore({"architectures", "model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype",
                 "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "output_router_logits",
                 "router_aux_loss_coef", "output_hidden_states", "output_attentions", "return_dict", "id2label",
                 "label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "auto_map",
                 "_attn_implementation", "attn_implementation", "tokenizer_class", "task_specific_params",
                 "torchscript", "pruned_heads", "use_bfloat16", "tf_legacy_loss", "tie_encoder_decoder",
                 "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "finetuning_task",
                 "_commit_hash", "model_max_length", "text_config"});
  return reader.Count("num_hidden_layers", std::nullopt, kLayerLimit);
}

// Heads and their size, q and k and v alike.
AttentionDescription ReadHeads(ConfigReader& reader, int64_t hidden_size) {
  AttentionDescription attention;
  attention.query_head_count = reader.Count("num_attention_heads", std::nullopt, kHeadLimit);
  // An explicit null means one kv head a query head; without the key transformers versions differ.
  if (!reader.root().contains("num_key_value_heads")) {
    reader.Fail("num_key_value_heads", "is missing");
  }
  attention.kv_head_count =
      reader.Count("num_key_value_heads", attention.query_head_count, kHeadLimit);
  if (reader.Find("head_dim") == nullptr && reader.status().ok() &&
      hidden_size % attention.query_head_count != 0) {
    reader.Fail("head_dim",
                "is missing, and \"num_attention_heads\" does not divide \"hidden_size\"");
  }
  attention.head_size =
      reader.Count("head_dim", std::max<int64_t>(hidden_size / attention.query_head_count, 1),
                   kHeadLimit);
  if (attention.query_head_count % attention.kv_head_count != 0) {
    reader.Fail("num_key_value_heads", "does not divide \"num_attention_heads\"");
  }
  if (attention.head_size % 2 != 0) {
    reader.Fail("head_dim", "is " + std::to_string(attention.head_size) +
                                "; the rotary embedding needs an even one");
  }
  return attention;
}

int64_t ReadExpertCount(ConfigReader& reader) {
  const json* a = reader.Find("num_experts");
  const json* b = reader.Find("num_local_experts");
  if (a != nullptr && b != nullptr && *a != *b) {
    reader.Fail("num_experts", "is " + ConfigReader::Excerpt(*a) +
                                   " and \"num_local_experts\" is " + ConfigReader::Excerpt(*b));
  }
  return reader.Count(a != nullptr || b == nullptr ? "num_experts" : "num_local_experts",
                      std::nullopt);
}

void ReadExperts(ConfigReader& reader, const char* per_token, const char* width,
                 ModelDescription* model) {
  model->expert_count = ReadExpertCount(reader);
  model->experts_per_token = reader.Count(per_token, std::nullopt);
  model->expert_width = reader.Count(width, std::nullopt);
  if (model->experts_per_token > model->expert_count) {
    reader.Fail(per_token, "is above the number of experts");
  }
}

// Each layer's kind by name; empty: the key is absent.
std::vector<std::string> ReadLayerTypes(ConfigReader& reader, int64_t layer_count,
                                        std::initializer_list<std::string_view> known) {
  std::vector<std::string> types;
  const json* list = reader.Find("layer_types");
  if (list == nullptr) return types;
  if (!list->is_array()) {
    reader.Fail("layer_types", "is not a list");
    return types;
  }
  for (const json& type : *list) {
    const bool is_known = type.is_string() && std::find(known.begin(), known.end(),
                                                        type.get<std::string>()) != known.end();
    if (!is_known) {
      reader.Fail("layer_types",
                  "has " + ConfigReader::Excerpt(type) + ", which training does not implement");
      return {};
    }
    types.push_back(type.get<std::string>());
  }
  if (static_cast<int64_t>(types.size()) != layer_count) {
    reader.Fail("layer_types", "names " + std::to_string(types.size()) + " layers, \"num_hidden_layers\" " +
                                   std::to_string(layer_count));
    return {};
  }
  return types;
}

// Layer n is dense if it is in mlp_only_layers or (n + 1) % decoder_sparse_step != 0.
void ReadQwen3Mixtures(ConfigReader& reader, ModelDescription* model) {
  const int64_t sparse_step = reader.Count("decoder_sparse_step", 1);
  for (size_t layer = 0; layer < model->layers.size(); ++layer) {
    if ((static_cast<int64_t>(layer) + 1) % sparse_step != 0) {
      model->layers[layer].mixture = MixtureKind::kDense;
    }
  }
  if (const json* dense = reader.Find("mlp_only_layers"); dense != nullptr) {
    if (!dense->is_array()) reader.Fail("mlp_only_layers", "is not a list");
    for (const json& entry : *dense) {
      if (!entry.is_number_unsigned()) {
        reader.Fail("mlp_only_layers", "has " + ConfigReader::Excerpt(entry) + ", not a layer");
        continue;
      }
      // A number beyond the last layer names no layer, as in transformers.
      const uint64_t layer = entry.get<uint64_t>();
      if (layer < model->layers.size()) model->layers[layer].mixture = MixtureKind::kDense;
    }
  }
  const bool any_dense =
      std::any_of(model->layers.begin(), model->layers.end(), [](const LayerDescription& layer) {
        return layer.mixture == MixtureKind::kDense;
      });
  if (any_dense) model->dense_width = reader.Count("intermediate_size", std::nullopt);
  reader.Ignore({"intermediate_size"});
}

}  // namespace

void ReadMixtral(ConfigReader& reader, ModelDescription* model) {
  const int64_t layer_count = ReadShared(reader, model);
  LayerDescription layer{.attention = ReadHeads(reader, model->hidden_size)};
  ReadExperts(reader, "num_experts_per_tok", "intermediate_size", model);
  model->norm = {.epsilon = reader.Positive("rms_norm_eps", 1e-5)};
  model->tied_embedding = reader.Flag("tie_word_embeddings", false);
  model->max_positions = reader.Count("max_position_embeddings", 131072, kPositionLimit);
  if (reader.Find("sliding_window") != nullptr) {
    layer.attention.sliding_window = reader.Count("sliding_window", std::nullopt, kPositionLimit);
  }
  layer.attention.rotary =
      ReadRope(reader, {.default_theta = 1e6,
                        .head_size = layer.attention.head_size,
                        .max_positions = model->max_positions});
  reader.RefuseUnless("hidden_act", {"silu", "swish"});
  ReadLayerTypes(reader, layer_count, {"full_attention"});
  model->layers.assign(static_cast<size_t>(layer_count), layer);
}

void ReadQwen3(ConfigReader& reader, ModelDescription* model) {
  const int64_t layer_count = ReadShared(reader, model);
  LayerDescription layer{.attention = ReadHeads(reader, model->hidden_size)};
  layer.attention.query_key_norm = true;
  ReadExperts(reader, "num_experts_per_tok", "moe_intermediate_size", model);
  model->renormalize_top_k = reader.Flag("norm_topk_prob", false);
  model->norm = {.epsilon = reader.Positive("rms_norm_eps", 1e-6)};
  model->tied_embedding = reader.Flag("tie_word_embeddings", false);
  model->max_positions = reader.Count("max_position_embeddings", 32768, kPositionLimit);
  layer.attention.rotary = ReadRope(reader, {.may_be_yarn = true,
                                             .head_size = layer.attention.head_size,
                                             .max_positions = model->max_positions});
  reader.RefuseUnless("hidden_act", {"silu", "swish"});
  reader.RefuseUnless("use_sliding_window", {false});
  // Without use_sliding_window these two switch nothing on.
  reader.Ignore({"sliding_window", "max_window_layers"});
  ReadLayerTypes(reader, layer_count, {"full_attention"});
  model->layers.assign(static_cast<size_t>(layer_count), layer);
  ReadQwen3Mixtures(reader, model);
}

void ReadQwen35(ConfigReader& reader, ModelDescription* model) {
  const int64_t layer_count = ReadShared(reader, model);
  LayerDescription attention{.attention = ReadHeads(reader, model->hidden_size),
                             .mixture = MixtureKind::kRoutedAndShared};
  attention.attention.query_key_norm = true;
  attention.attention.output_gate = true;
  reader.RefuseUnless("attn_output_gate", {true});
  // transformers does not read it: the gate of attention is a sigmoid, that of Gated DeltaNet a SiLU.
  reader.RefuseUnless("output_gate_type", {"swish", "sigmoid"});
  LayerDescription linear{.mixer = MixerKind::kDeltaNet, .mixture = MixtureKind::kRoutedAndShared};
  linear.delta_net = {
      .key_head_count = reader.Count("linear_num_key_heads", 16, kHeadLimit),
      .value_head_count = reader.Count("linear_num_value_heads", 32, kHeadLimit),
      .key_head_size = reader.Count("linear_key_head_dim", 128, kHeadLimit),
      .value_head_size = reader.Count("linear_value_head_dim", 128, kHeadLimit),
      .tap_count = reader.Count("linear_conv_kernel_dim", 4, 64)};
  if (linear.delta_net.value_head_count % linear.delta_net.key_head_count != 0) {
    reader.Fail("linear_num_value_heads", "is no multiple of \"linear_num_key_heads\"");
  }
  ReadExperts(reader, "num_experts_per_tok", "moe_intermediate_size", model);
  model->shared_width = reader.Count("shared_expert_intermediate_size", std::nullopt);
  // Every layer has experts, and its weights are always normalised.
  reader.RefuseUnless("norm_topk_prob", {true});
  reader.RefuseUnless("decoder_sparse_step", {1});
  reader.RefuseUnless("mlp_only_layers", {json::array()});
  model->norm = {.epsilon = reader.Positive("rms_norm_eps", 1e-6),
                 .scale = NormScale::kOnePlusWeight};
  model->tied_embedding = reader.Flag("tie_word_embeddings", false);
  model->max_positions = reader.Count("max_position_embeddings", 32768, kPositionLimit);
  attention.attention.rotary = ReadRope(reader, {.may_be_yarn = true,
                                                 .default_partial = 0.25,
                                                 .head_size = attention.attention.head_size,
                                                 .max_positions = model->max_positions});
  reader.RefuseUnless("hidden_act", {"silu", "swish"});
  reader.RefuseUnless("use_sliding_window", {false});
  // The recurrence is always FP32. Heads that predict further tokens are carried along, not trained.
  reader.RefuseUnless("mamba_ssm_dtype", {"float32"});
  reader.Ignore({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "sliding_window",
                 "max_window_layers", "intermediate_size"});
  const int64_t interval = reader.Count("full_attention_interval", 4, kLayerLimit);
  const std::vector<std::string> types =
      ReadLayerTypes(reader, layer_count, {"linear_attention", "full_attention"});
  for (int64_t layer = 0; layer < layer_count; ++layer) {
    const bool full = types.empty() ? (layer + 1) % interval == 0
                                    : types[static_cast<size_t>(layer)] == "full_attention";
    model->layers.push_back(full ? attention : linear);
  }
}

namespace {

// What newer files have in place of Gemma 4's `global_*` keys: layers' own head sizes and key/value
// heads, by the layer's number, padded with zeros.
void ReadPerLayer(ConfigReader& reader, const json& all, ModelDescription* model) {
  if (!all.is_object()) return reader.Fail("per_layer_config", "is not an object");
  for (const auto& [name, values] : all.items()) {
    constexpr size_t kMostDigits = 6;
    const bool number = !name.empty() && name.size() <= kMostDigits &&
                        name.find_first_not_of("0123456789") == std::string::npos;
    if (!number || std::stoll(name) >= model->layer_count() || !values.is_object()) {
      return reader.Fail("per_layer_config", "has \"" + name +
                                                 "\": " + ConfigReader::Excerpt(values) +
                                                 ", which is no layer of this model");
    }
    for (const auto& [key, value] : values.items()) {
      if (key != "head_dim" && key != "num_key_value_heads") {
        reader.Fail("per_layer_config." + name + "." + key,
                    "is " + ConfigReader::Excerpt(value) + ", which training does not implement");
      }
    }
    AttentionDescription& attention = model->layers[std::stoull(name)].attention;
    attention.head_size = reader.Count(values, "head_dim", attention.head_size, kHeadLimit);
    attention.kv_head_count =
        reader.Count(values, "num_key_value_heads", attention.kv_head_count, kHeadLimit);
  }
}

// Each layer's heads. The global layers' own are in `global_*` keys, or by layer.
void ReadGemmaHeads(ConfigReader& reader, int64_t head_size, bool key_is_value,
                    ModelDescription* model) {
  constexpr int64_t kDefaultGlobalHead = 512;
  const int64_t global_head = reader.Count("global_head_dim", kDefaultGlobalHead, kHeadLimit);
  const int64_t kv_heads = model->layers.front().attention.kv_head_count;
  const int64_t global_kv_heads = reader.Count("num_global_key_value_heads", kv_heads, kHeadLimit);
  if (const json* all = reader.Find("per_layer_config"); all != nullptr) {
    ReadPerLayer(reader, *all, model);
  } else {
    for (LayerDescription& layer : model->layers) {
      AttentionDescription& attention = layer.attention;
      const bool global = attention.sliding_window == 0;
      attention.head_size = global ? global_head : head_size;
      if (global && key_is_value) attention.kv_head_count = global_kv_heads;
    }
  }
  for (const LayerDescription& layer : model->layers) {
    const AttentionDescription& attention = layer.attention;
    if (attention.query_head_count % attention.kv_head_count != 0) {
      reader.Fail("num_global_key_value_heads",
                  "or a layer's does not divide \"num_attention_heads\"");
    }
    if (attention.head_size % 2 != 0) {
      reader.Fail("global_head_dim", "or a layer's is odd; the rotary embedding needs an even one");
    }
  }
}

// One kind of Gemma 4's layers, from rope_parameters.KIND.
RotaryRule ReadGemmaRope(ConfigReader& reader, const char* kind, double default_theta,
                         const char* rope_type, int64_t head_size) {
  RotaryRule rule{.theta = default_theta, .size = head_size, .pair_count = head_size / 2};
  const json* parameters = reader.Find("rope_parameters");
  const bool proportional = std::string_view(rope_type) == "proportional";
  double partial = proportional ? 0.25 : 1.0;
  if (parameters != nullptr) {
    if (!parameters->is_object() || !parameters->contains(kind) ||
        !(*parameters)[kind].is_object()) {
      reader.Fail("rope_parameters", "has no object \"" + std::string(kind) + "\"");
      return rule;
    }
    const json& rope = (*parameters)[kind];
    if (!rope.contains("rope_type")) {
      reader.Fail("rope_parameters." + std::string(kind) + ".rope_type", "is missing");
    }
    partial = 1.0;
    for (const auto& [name, value] : rope.items()) {
      const bool harmless = value.is_null() || name == "rope_theta" ||
                            (name == "rope_type" && value == rope_type) ||
                            (name == "factor" && value == 1.0) ||
                            (name == "partial_rotary_factor" && (proportional || value == 1.0));
      if (!harmless) {
        reader.Fail("rope_parameters." + std::string(kind) + "." + name,
                    "is " + ConfigReader::Excerpt(value) + ", which training does not implement");
      }
    }
    rule.theta = reader.Positive(rope, "rope_theta", default_theta);
    partial = reader.Positive(rope, "partial_rotary_factor", partial);
  }
  // Frequencies keep the whole head's exponents; those of later pairs are 0.
  rule.pair_count =
      static_cast<int64_t>(std::min(partial, 2.0) * static_cast<double>(head_size) / 2);
  if (rule.pair_count < 1 || 2 * rule.pair_count > head_size) {
    reader.Fail("rope_parameters", "turns no part of a head, or more than one");
    rule.pair_count = head_size / 2;
  }
  return rule;
}

}  // namespace

void ReadGemma4(ConfigReader& reader, ModelDescription* model) {
  const int64_t layer_count = ReadShared(reader, model);
  // Without the key transformers has a size of its own.
  if (!reader.root().contains("head_dim")) reader.Fail("head_dim", "is missing");
  AttentionDescription sliding = ReadHeads(reader, model->hidden_size);
  sliding.query_key_norm = true;
  sliding.value_norm = true;
  sliding.score_scale = 1.0;
  AttentionDescription global = sliding;
  sliding.sliding_window = reader.Count("sliding_window", 512, kPositionLimit);
  global.key_is_value = reader.Flag("attention_k_eq_v", false);
  if (!reader.Flag("enable_moe_block", false)) {
    reader.Fail("enable_moe_block", "is not true; only Gemma 4 with experts is trained");
  }
  reader.RefuseUnless("num_kv_shared_layers", {0});
  // Without the key transformers makes embeddings for each layer.
  reader.RefuseUnless("hidden_size_per_layer_input", {0});
  if (!reader.root().contains("hidden_size_per_layer_input")) {
    reader.Fail("hidden_size_per_layer_input", "is missing; it must be 0");
  }
  reader.RefuseUnless("use_double_wide_mlp", {false});
  reader.RefuseUnless("hidden_activation", {"gelu_pytorch_tanh"});
  // Concerns images alone.
  reader.RefuseUnless("use_bidirectional_attention", {"vision"});
  reader.Ignore({"vocab_size_per_layer_input"});
  ReadExperts(reader, "top_k_experts", "moe_intermediate_size", model);
  model->dense_width = reader.Count("intermediate_size", std::nullopt);
  model->activation = Activation::kGeluTanh;
  model->norm = {.epsilon = reader.Positive("rms_norm_eps", 1e-6), .scale = NormScale::kWeight};
  model->branch_norms = true;
  model->embedding_scale = std::sqrt(static_cast<double>(model->hidden_size));
  model->logit_cap = reader.Find("final_logit_softcapping") == nullptr
                         ? 0.0
                         : reader.Positive("final_logit_softcapping", 30.0);
  model->tied_embedding = reader.Flag("tie_word_embeddings", true);
  if (!model->tied_embedding) {
    reader.Fail("tie_word_embeddings", "is false; Gemma 4 has no head of its own");
  }
  model->max_positions = reader.Count("max_position_embeddings", 131072, kPositionLimit);
  const std::vector<std::string> types =
      ReadLayerTypes(reader, layer_count, {"sliding_attention", "full_attention"});
  for (int64_t layer = 0; layer < layer_count; ++layer) {
    // The last layer is always a full one.
    const bool full = layer + 1 == layer_count ||
                      (types.empty() ? (layer + 1) % 6 == 0
                                     : types[static_cast<size_t>(layer)] == "full_attention");
    model->layers.push_back(
        {.attention = full ? global : sliding, .mixture = MixtureKind::kRoutedAndDense});
  }
  ReadGemmaHeads(reader, sliding.head_size, global.key_is_value, model);
  for (LayerDescription& layer : model->layers) {
    AttentionDescription& attention = layer.attention;
    attention.rotary =
        attention.sliding_window == 0
            ? ReadGemmaRope(reader, "full_attention", 1e6, "proportional", attention.head_size)
            : ReadGemmaRope(reader, "sliding_attention", 1e4, "default", attention.head_size);
  }
}

}  // namespace oom
