// config.json: every key that changes the numbers is read or refused by name.

#include "runtime/model/hf_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/model/model_testing.h"

namespace oom {
namespace {

using testing::IsError;
using testing::Multimodal;
using testing::TinyGemmaConfig;
using testing::TinyMixtralConfig;
using testing::TinyQwen35Config;
using testing::TinyQwenConfig;
using testing::WithKey;

Result<ModelDescription> Parse(const std::string& config) {
  return ParseHfConfig(config, "m/config.json");
}

std::vector<MixtureKind> Mixtures(const ModelDescription& model) {
  std::vector<MixtureKind> mixtures;
  for (const LayerDescription& layer : model.layers) mixtures.push_back(layer.mixture);
  return mixtures;
}

TEST(HfConfig, ReadsQwen3Moe) {
  const auto model = Parse(TinyQwenConfig());
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ(model->family, Family::kQwen3Moe);
  EXPECT_EQ(model->hidden_size, 24);
  EXPECT_EQ(model->layer_count(), 3);
  EXPECT_EQ(model->vocabulary_size, 97);
  EXPECT_EQ(model->layer(0).attention.query_head_count, 4);
  EXPECT_EQ(model->layer(0).attention.kv_head_count, 2);
  EXPECT_EQ(model->layer(0).attention.head_size, 8);
  EXPECT_EQ(model->expert_count, 5);
  EXPECT_EQ(model->experts_per_token, 2);
  EXPECT_EQ(model->expert_width, 12);
  EXPECT_EQ(model->dense_width, 20);
  EXPECT_TRUE(model->layer(0).attention.query_key_norm);
  EXPECT_TRUE(model->renormalize_top_k);
  EXPECT_EQ(model->norm.epsilon, 1e-6);
  EXPECT_EQ(model->rotary()->theta, 1e6);
  EXPECT_EQ(model->layer(0).attention.sliding_window, 0);
  EXPECT_EQ(model->max_positions, 64);
  EXPECT_FALSE(model->tied_embedding);
  EXPECT_EQ(Mixtures(*model),
            (std::vector<MixtureKind>{MixtureKind::kRoutedExperts, MixtureKind::kDense,
                                      MixtureKind::kRoutedExperts}));
}

TEST(HfConfig, ReadsMixtral) {
  const auto model = Parse(TinyMixtralConfig());
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ(model->family, Family::kMixtral);
  EXPECT_EQ(model->layer(0).attention.head_size,
            6);  // hidden_size / heads, since head_dim is absent.
  EXPECT_EQ(model->expert_width, 20);
  EXPECT_EQ(model->dense_width, 0);
  EXPECT_FALSE(model->layer(0).attention.query_key_norm);
  EXPECT_TRUE(model->renormalize_top_k);
  EXPECT_EQ(model->layer(0).attention.sliding_window, 16);
  EXPECT_EQ(model->rotary()->theta, 5e5);
  EXPECT_EQ(model->norm.epsilon, 1e-5);
}

TEST(HfConfig, AcceptsTheKeysOfEveryTransformersVersion) {
  const std::string base = TinyQwenConfig();
  const std::string renamed = WithKey(WithKey(base, "num_experts", ""), "num_local_experts", "5");
  EXPECT_EQ(Parse(renamed)->expert_count, 5);
  const std::string rope = WithKey(WithKey(base, "rope_theta", ""), "rope_parameters",
                                   R"({"rope_theta": 7e5, "rope_type": "default"})");
  EXPECT_EQ(Parse(rope)->rotary()->theta, 7e5);
  EXPECT_EQ(Parse(WithKey(base, "rope_theta", ""))->rotary()->theta, 1e4);
  EXPECT_TRUE(Parse(WithKey(base, "rope_scaling", "null")).ok());
  EXPECT_TRUE(Parse(WithKey(base, "rope_scaling", R"({"type": "default"})")).ok());
  EXPECT_TRUE(Parse(WithKey(base, "attention_dropout", "0.0")).ok());
  EXPECT_TRUE(Parse(WithKey(base, "architectures", "")).ok());
  EXPECT_TRUE(Parse(WithKey(base, "model_type", "")).ok());
  EXPECT_EQ(Parse(WithKey(base, "head_dim", "null"))->layer(0).attention.head_size, 6);
  EXPECT_EQ(Parse(WithKey(base, "num_key_value_heads", "null"))->layer(0).attention.kv_head_count,
            4);
  // A window that is not in use.
  EXPECT_EQ(Parse(WithKey(base, "sliding_window", "8"))->layer(0).attention.sliding_window, 0);
  EXPECT_FALSE(Parse(WithKey(base, "norm_topk_prob", ""))->renormalize_top_k);
  EXPECT_TRUE(Parse(WithKey(base, "tie_word_embeddings", "true"))->tied_embedding);
}

TEST(HfConfig, ReadsYarnAsTransformersDoes) {
  const auto yarn_of = [](const std::string& rope) {
    const auto model = Parse(WithKey(TinyQwenConfig(), "rope_scaling", rope));
    EXPECT_TRUE(model.ok()) << model.status().ToString();
    EXPECT_TRUE(model->yarn().has_value());
    return model->yarn().value_or(YarnScaling());
  };
  EXPECT_FALSE(Parse(TinyQwenConfig())->yarn().has_value());
  const YarnScaling usual =
      yarn_of(R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})");
  EXPECT_EQ(usual, MakeYarn(4.0, 16));
  EXPECT_DOUBLE_EQ(usual.attention_factor, 0.1 * std::log(4.0) + 1.0);
  // The old name of the kind; the original context is the configuration's unless it is given.
  EXPECT_EQ(yarn_of(R"({"type": "yarn", "factor": 2})"), MakeYarn(2.0, 64));
  EXPECT_EQ(
      yarn_of(R"({"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 16})"),
      MakeYarn(4.0, 16));
  const YarnScaling own = yarn_of(
      R"({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": false,
          "mscale": 1.0, "mscale_all_dim": 0.5})");
  EXPECT_EQ(own.beta_fast, 16.0);
  EXPECT_EQ(own.beta_slow, 2.0);
  EXPECT_FALSE(own.truncate);
  EXPECT_DOUBLE_EQ(own.attention_factor,
                   (0.1 * std::log(4.0) + 1.0) / (0.05 * std::log(4.0) + 1.0));
  EXPECT_EQ(
      yarn_of(R"({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5})").attention_factor,
      1.5);
  const std::string parameters =
      R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 7e5})";
  const auto v5 =
      Parse(WithKey(WithKey(TinyQwenConfig(), "rope_theta", ""), "rope_parameters", parameters));
  ASSERT_TRUE(v5.ok()) << v5.status().ToString();
  EXPECT_EQ(v5->yarn(), MakeYarn(4.0, 16));
  EXPECT_EQ(v5->rotary()->theta, 7e5);
  // Twice, and not the same.
  const std::string both = WithKey(WithKey(TinyQwenConfig(), "rope_theta", ""), "rope_scaling",
                                   R"({"rope_type": "default"})");
  EXPECT_TRUE(IsError(Parse(WithKey(both, "rope_parameters", parameters)), Code::kInvalidArgument,
                      {"rope_parameters", "differs"}));
  EXPECT_TRUE(IsError(Parse(WithKey(TinyMixtralConfig(), "rope_parameters", parameters)),
                      Code::kInvalidArgument, {"rope_parameters", "yarn"}));
}

// Goal: the published 26B-A4B (models reference, section 5), layer by layer.
TEST(HfConfig, ReadsQwen35sTwoKindsOfLayers) {
  const auto model = Parse(TinyQwen35Config());
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ(model->family, Family::kQwen35Moe);
  EXPECT_EQ(model->norm.scale, NormScale::kOnePlusWeight);
  EXPECT_EQ(model->shared_width, 10);
  EXPECT_TRUE(model->renormalize_top_k);
  ASSERT_EQ(model->layer_count(), 4);
  for (int64_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(model->layer(layer).mixture, MixtureKind::kRoutedAndShared);
    EXPECT_EQ(model->layer(layer).mixer, layer == 3 ? MixerKind::kAttention : MixerKind::kDeltaNet);
  }
  EXPECT_EQ(model->layer(0).delta_net.channel_count(), 2 * 2 * 8 + 4 * 6);
  EXPECT_EQ(model->layer(0).delta_net.tap_count, 4);
  const AttentionDescription& attention = model->layer(3).attention;
  EXPECT_TRUE(attention.output_gate);
  EXPECT_TRUE(attention.query_key_norm);
  EXPECT_EQ(attention.rotary, (RotaryRule{.theta = 1e7, .size = 4, .pair_count = 2}));

  const auto listed = Parse(
      WithKey(TinyQwen35Config(), "layer_types",
              R"(["full_attention", "linear_attention", "full_attention", "linear_attention"])"));
  ASSERT_TRUE(listed.ok()) << listed.status().ToString();
  EXPECT_EQ(listed->layer(0).mixer, MixerKind::kAttention);
  EXPECT_EQ(listed->layer(3).mixer, MixerKind::kDeltaNet);
  // As the multimodal files have it, with keys of both; the text's alone decide.
  const std::string nested = R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"],
      "model_type": "qwen3_5_moe", "image_token_id": 90, "vision_config": {"depth": 1},
      "text_config": )" + WithKey(TinyQwen35Config(), "architectures", "") +
                             "}";
  const auto multimodal = Parse(nested);
  ASSERT_TRUE(multimodal.ok()) << multimodal.status().ToString();
  EXPECT_EQ(*multimodal, *model);
}

TEST(HfConfig, RefusesByNameTheQwen35sThatTrainingDoesNotImplement) {
  const std::pair<const char*, const char*> cases[] = {
      {"attn_output_gate", "false"},
      {"output_gate_type", "\"tanh\""},
      {"linear_num_value_heads", "3"},
      {"layer_types", R"(["linear_attention", "full_attention"])"},
      {"layer_types",
       R"(["sliding_attention", "full_attention", "full_attention", "full_attention"])"},
      {"mlp_only_layers", "[1]"},
      {"decoder_sparse_step", "2"},
      {"norm_topk_prob", "false"},
      {"mamba_ssm_dtype", "\"bfloat16\""},
      {"shared_expert_intermediate_size", ""},
      {"attention_bias", "true"},
      {"rope_parameters", R"({"rope_type": "longrope", "rope_theta": 1e7})"},
      {"rope_parameters", R"({"rope_type": "default", "partial_rotary_factor": 0.1})"},
      {"rope_parameters", R"({"rope_type": "default", "partial_rotary_factor": 1e300})"},
      {"linear_attention_variant", "\"kimi\""},
  };
  for (const auto& [key, value] : cases) {
    const std::string named = std::string_view(value).find("partial") != std::string_view::npos
                                  ? "partial_rotary_factor"
                                  : key;
    EXPECT_TRUE(IsError(Parse(WithKey(TinyQwen35Config(), key, value)), Code::kInvalidArgument,
                        {"m/config.json", named}))
        << key << " " << value;
  }
}

TEST(HfConfig, ReadsGemma4sTwoKindsOfLayers) {
  const auto model = ReadHfConfig(OOM_SOURCE_DIR "/geometries/gemma4-26b-a4b");
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ(model->family, Family::kGemma4);
  EXPECT_EQ(model->layer_count(), 30);
  EXPECT_EQ(model->activation, Activation::kGeluTanh);
  EXPECT_EQ(model->norm, (NormRule{.epsilon = 1e-6, .scale = NormScale::kWeight}));
  EXPECT_TRUE(model->branch_norms);
  EXPECT_TRUE(model->renormalize_top_k);
  EXPECT_TRUE(model->tied_embedding);
  EXPECT_EQ(model->embedding_scale, std::sqrt(2816.0));
  EXPECT_EQ(model->logit_cap, 30.0);
  EXPECT_EQ(model->expert_count, 128);
  EXPECT_EQ(model->experts_per_token, 8);
  EXPECT_EQ(model->expert_width, 704);
  EXPECT_EQ(model->dense_width, 2112);
  const AttentionDescription sliding = {.query_head_count = 16,
                                        .kv_head_count = 8,
                                        .head_size = 256,
                                        .query_key_norm = true,
                                        .value_norm = true,
                                        .score_scale = 1.0,
                                        .sliding_window = 1024,
                                        .rotary = {.theta = 1e4, .size = 256, .pair_count = 128}};
  AttentionDescription global = sliding;
  global.kv_head_count = 2;
  global.head_size = 512;
  global.key_is_value = true;
  global.sliding_window = 0;
  global.rotary = {.theta = 1e6, .size = 512, .pair_count = 64};
  for (int64_t layer = 0; layer < 30; ++layer) {
    EXPECT_EQ(model->layer(layer).attention, layer % 6 == 5 ? global : sliding) << layer;
    EXPECT_EQ(model->layer(layer).mixture, MixtureKind::kRoutedAndDense);
  }
}

TEST(HfConfig, ReadsGemma4AsAnyTransformersVersionWritesIt) {
  const std::string base = TinyGemmaConfig();
  const auto model = Parse(base);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ(model->layer(5).attention.head_size, 16);
  EXPECT_EQ(*Parse(Multimodal(base)), *model);
  // Newer versions keep the global layers' heads by layer, and pad the layer's number.
  const std::string bare =
      WithKey(WithKey(base, "global_head_dim", ""), "num_global_key_value_heads", "");
  for (const char* by_layer : {R"({"5": {"head_dim": 16, "num_key_value_heads": 1}})",
                               R"({"05": {"head_dim": 16, "num_key_value_heads": 1}})"}) {
    const auto newer = Parse(WithKey(bare, "per_layer_config", by_layer));
    ASSERT_TRUE(newer.ok()) << newer.status().ToString();
    EXPECT_EQ(*newer, *model);
  }
  EXPECT_EQ(Parse(WithKey(bare, "per_layer_config", "{}"))->layer(5).attention.head_size, 8);
  // What transformers takes where a key is absent.
  EXPECT_EQ(*Parse(WithKey(WithKey(base, "layer_types", ""), "rope_parameters", "")), *model);
  EXPECT_EQ(Parse(bare)->layer(5).attention.head_size, 512);
  const auto own_values = Parse(WithKey(base, "attention_k_eq_v", "false"));
  EXPECT_FALSE(own_values->layer(5).attention.key_is_value);
  EXPECT_EQ(own_values->layer(5).attention.kv_head_count, 2);
  EXPECT_EQ(Parse(WithKey(base, "final_logit_softcapping", "null"))->logit_cap, 0.0);
  // The last layer is a full one whatever the list says.
  const auto forced = Parse(
      WithKey(WithKey(base, "num_hidden_layers", "1"), "layer_types", R"(["sliding_attention"])"));
  EXPECT_EQ(forced->layer(0).attention.sliding_window, 0);
}

TEST(HfConfig, RefusesByNameTheGemmasThatTrainingDoesNotImplement) {
  const std::pair<const char*, const char*> cases[] = {
      {"num_kv_shared_layers", "2"},
      {"hidden_size_per_layer_input", "256"},
      {"hidden_size_per_layer_input", ""},
      {"use_double_wide_mlp", "true"},
      {"enable_moe_block", "false"},
      {"enable_moe_block", ""},
      {"hidden_activation", "\"silu\""},
      {"use_bidirectional_attention", "\"all\""},
      {"tie_word_embeddings", "false"},
      {"final_logit_softcapping", "-1"},
      {"head_dim", ""},
      {"global_head_dim", "7"},
      {"num_global_key_value_heads", "3"},
      {"layer_types", R"(["full_attention"])"},
      {"rope_parameters", R"({"rope_type": "default"})"},
      {"rope_parameters", R"({"sliding_attention": {"rope_type": "default"},
                              "full_attention": {"rope_type": "yarn", "factor": 2.0}})"},
      {"rope_parameters", R"({"sliding_attention": {"rope_type": "linear"},
                              "full_attention": {"rope_type": "proportional"}})"},
      {"rope_parameters", R"({"sliding_attention": {"rope_type": "default"},
                              "full_attention": {"rope_type": "proportional", "factor": 8.0}})"},
      {"rope_parameters", R"({"sliding_attention": {"rope_type": "default"},
                              "full_attention": {"rope_theta": 1e6}})"},
      {"per_layer_config", R"({"6": {"head_dim": 16}})"},
      {"per_layer_config", R"({"five": {"head_dim": 16}})"},
      {"per_layer_config", R"({"5": {"sliding_window": 4}})"},
      {"per_layer_config", R"({"5": {"head_dim": 0}})"},
      {"per_layer_config", "[1]"},
      {"attn_logit_softcapping", "50.0"},
  };
  for (const auto& [key, value] : cases) {
    // Some messages name the key within.
    const std::string named = std::string(value) == R"({"5": {"head_dim": 0}})" ? "head_dim" : key;
    EXPECT_TRUE(IsError(Parse(WithKey(TinyGemmaConfig(), key, value)), Code::kInvalidArgument,
                        {"m/config.json", named}))
        << key << " " << value;
  }
}

TEST(HfConfig, SparseStepMakesDenseLayers) {
  const auto model = Parse(
      WithKey(WithKey(TinyQwenConfig(), "mlp_only_layers", "[]"), "decoder_sparse_step", "2"));
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(Mixtures(*model),
            (std::vector<MixtureKind>{MixtureKind::kDense, MixtureKind::kRoutedExperts,
                                      MixtureKind::kDense}));
}

// Each value would change the numbers, or cannot be meant: the message names the file and the key.
TEST(HfConfig, RefusesByNameWhatTrainingDoesNotImplement) {
  const std::pair<const char*, const char*> cases[] = {
      {"rope_scaling", R"({"type": "longrope", "factor": 4.0})"},
      {"rope_scaling", R"({"type": "default", "factor": 4.0})"},
      {"rope_scaling", R"({"rope_type": "yarn", "type": "linear", "factor": 4.0})"},
      {"rope_scaling", R"({"rope_type": "yarn", "factor": 4.0, "short_factor": [1.0]})"},
      {"rope_scaling", R"({"rope_type": "yarn"})"},
      {"rope_scaling", R"({"rope_type": "yarn", "factor": 0.5})"},
      {"rope_scaling", R"({"rope_type": "yarn", "factor": 2.0, "truncate": null})"},
      {"rope_parameters", R"({"rope_type": "linear", "rope_theta": 1e6})"},
      {"rope_parameters", R"({"rope_type": "default", "rope_theta": 2e6})"},
      {"rope_parameters", R"({"rope_type": "default", "partial_rotary_factor": 0.5})"},
      {"rope_parameters", "3"},
      {"partial_rotary_factor", "0.25"},
      {"attention_bias", "true"},
      {"attention_dropout", "0.1"},
      {"router_jitter_noise", "0.01"},
      {"hidden_act", "\"gelu\""},
      {"use_sliding_window", "true"},
      {"quantization_config", R"({"quant_method": "fp8"})"},
      {"layer_types", R"(["full_attention", "sliding_attention"])"},
      {"num_local_experts", "4"},
      {"num_experts_per_tok", "6"},
      {"num_key_value_heads", "3"},
      {"num_key_value_heads", ""},
      {"head_dim", "7"},
      {"hidden_size", ""},
      {"hidden_size", "0"},
      {"hidden_size", "-24"},
      {"hidden_size", "24.5"},
      {"hidden_size", "\"24\""},
      {"vocab_size", "99999999999999999999"},
      {"num_hidden_layers", "1000000000"},
      {"rms_norm_eps", "0"},
      {"tie_word_embeddings", "1"},
      {"intermediate_size", ""},  // The dense layer needs it.
      {"mlp_only_layers", "[-1]"},
      {"attn_output_gate", "true"},  // A key of another family, and one of none.
      {"mixture_of_depths", "0.5"},
  };
  for (const auto& [key, value] : cases) {
    EXPECT_TRUE(IsError(Parse(WithKey(TinyQwenConfig(), key, value)), Code::kInvalidArgument,
                        {"m/config.json", key}))
        << key << " " << value;
  }
}

TEST(HfConfig, RefusesAnUnknownArchitectureWithOneErrorThatNamesIt) {
  const std::string config =
      WithKey(WithKey(TinyQwenConfig(), "architectures", R"(["GptOssForCausalLM"])"), "model_type",
              "\"gpt_oss\"");
  EXPECT_TRUE(IsError(Parse(config), Code::kInvalidArgument,
                      {"m/config.json", "GptOssForCausalLM", "gpt_oss", "Qwen3MoeForCausalLM"}));
  // Another head on a known backbone, and names that contradict each other.
  EXPECT_TRUE(IsError(
      Parse(WithKey(TinyQwenConfig(), "architectures", R"(["Qwen3MoeForSequenceClassification"])")),
      Code::kInvalidArgument, {"Qwen3MoeForSequenceClassification"}));
  EXPECT_TRUE(IsError(Parse(WithKey(TinyQwenConfig(), "model_type", "\"mixtral\"")),
                      Code::kInvalidArgument, {"mixtral"}));
  EXPECT_TRUE(IsError(Parse("{}"), Code::kInvalidArgument, {"architectures"}));
}

TEST(HfConfig, RefusesTextThatIsNotOneJsonObject) {
  EXPECT_TRUE(IsError(Parse(""), Code::kInvalidArgument, {"m/config.json", "JSON"}));
  EXPECT_TRUE(IsError(Parse("[1]"), Code::kInvalidArgument, {"m/config.json"}));
  EXPECT_TRUE(IsError(Parse("{} {}"), Code::kInvalidArgument, {"m/config.json"}));
  EXPECT_TRUE(IsError(Parse(R"({"a": 1, "a": 2})"), Code::kInvalidArgument, {"\"a\"", "twice"}));
  EXPECT_TRUE(IsError(ReadHfConfig("/nonexistent/model"), Code::kNotFound, {"/nonexistent/model"}));
}

}  // namespace
}  // namespace oom
