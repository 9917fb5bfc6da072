#include "planner/model_proto.h"

namespace oom {
namespace {

v1::ModelFamily FamilyProto(Family family) {
  switch (family) {
    case Family::kMixtral:
      return v1::MODEL_FAMILY_MIXTRAL;
    case Family::kQwen3Moe:
      return v1::MODEL_FAMILY_QWEN3_MOE;
    case Family::kQwen35Moe:
      return v1::MODEL_FAMILY_QWEN3_5_MOE;
    case Family::kGemma4:
      return v1::MODEL_FAMILY_GEMMA4;
  }
  return v1::MODEL_FAMILY_UNSPECIFIED;
}

void FillLayer(const LayerDescription& layer, v1::LayerDescription* out) {
  out->set_routed_experts(HasExperts(layer.mixture));
  if (layer.mixer == MixerKind::kDeltaNet) {
    const DeltaNetDescription& delta = layer.delta_net;
    v1::DeltaNetDescription* of_delta = out->mutable_delta_net();
    of_delta->set_key_head_count(delta.key_head_count);
    of_delta->set_value_head_count(delta.value_head_count);
    of_delta->set_key_head_size(delta.key_head_size);
    of_delta->set_value_head_size(delta.value_head_size);
    of_delta->set_tap_count(delta.tap_count);
    return;
  }
  const AttentionDescription& attention = layer.attention;
  out->set_sliding_window_tokens(attention.sliding_window);
  v1::AttentionDescription* of_attention = out->mutable_attention();
  of_attention->set_query_head_count(attention.query_head_count);
  of_attention->set_kv_head_count(attention.kv_head_count);
  of_attention->set_head_size(attention.head_size);
  of_attention->set_output_gate(attention.output_gate);
  of_attention->set_key_is_value(attention.key_is_value);
  of_attention->set_rope_theta(attention.rotary.theta);
  of_attention->set_rotated_elements(2 * attention.rotary.pair_count);
}

}  // namespace

v1::ModelDescription ToProto(const ModelDescription& model, int64_t parameter_count) {
  v1::ModelDescription out;
  out.set_family(FamilyProto(model.family));
  out.set_hidden_size(model.hidden_size);
  out.set_layer_count(model.layer_count());
  out.set_vocabulary_size(model.vocabulary_size);
  out.set_expert_count(model.expert_count);
  out.set_experts_per_token(model.experts_per_token);
  out.set_expert_width(model.expert_width);
  out.set_shared_width(model.shared_width);
  out.set_dense_width(model.dense_width);
  out.set_rms_epsilon(model.norm.epsilon);
  out.set_renormalize_top_k(model.renormalize_top_k);
  out.set_tied_embedding(model.tied_embedding);
  out.set_max_positions(model.max_positions);
  bool is_first_attention = true;
  for (const LayerDescription& layer : model.layers) {
    FillLayer(layer, out.add_layers());
    if (layer.mixer != MixerKind::kAttention || !is_first_attention) continue;
    is_first_attention = false;
    out.set_query_head_count(layer.attention.query_head_count);
    out.set_kv_head_count(layer.attention.kv_head_count);
    out.set_head_size(layer.attention.head_size);
    out.set_query_key_norm(layer.attention.query_key_norm);
    out.set_rope_theta(layer.attention.rotary.theta);
  }
  if (const std::optional<YarnScaling> yarn = model.yarn()) {
    v1::RopeScaling* scaling = out.mutable_rope_scaling();
    scaling->set_kind(v1::ROPE_SCALING_KIND_YARN);
    scaling->set_factor(yarn->factor);
    scaling->set_original_max_position_embeddings(yarn->original_positions);
  }
  out.set_parameter_count(parameter_count);
  return out;
}

}  // namespace oom
