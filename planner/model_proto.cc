#include "planner/model_proto.h"

namespace oom {

v1::ModelDescription ToProto(const ModelDescription& model, int64_t parameter_count) {
  v1::ModelDescription out;
  switch (model.family) {
    case Family::kMixtral: out.set_family(v1::MODEL_FAMILY_MIXTRAL); break;
    case Family::kQwen3Moe: out.set_family(v1::MODEL_FAMILY_QWEN3_MOE); break;
  }
  out.set_hidden_size(model.hidden_size);
  out.set_layer_count(model.layer_count);
  out.set_vocabulary_size(model.vocabulary_size);
  out.set_query_head_count(model.query_head_count);
  out.set_kv_head_count(model.kv_head_count);
  out.set_head_size(model.head_size);
  out.set_expert_count(model.expert_count);
  out.set_experts_per_token(model.experts_per_token);
  out.set_expert_width(model.expert_width);
  out.set_dense_width(model.dense_width);
  out.set_rms_epsilon(model.rms_epsilon);
  out.set_rope_theta(model.rope_theta);
  out.set_query_key_norm(model.query_key_norm);
  out.set_renormalize_top_k(model.renormalize_top_k);
  out.set_tied_embedding(model.tied_embedding);
  out.set_max_positions(model.max_positions);
  for (const MixtureKind kind : model.mixtures) {
    v1::LayerDescription* layer = out.add_layers();
    layer->set_routed_experts(kind == MixtureKind::kRoutedExperts);
    layer->set_sliding_window_tokens(model.sliding_window);
  }
  if (model.yarn) {
    v1::RopeScaling* scaling = out.mutable_rope_scaling();
    scaling->set_kind(v1::ROPE_SCALING_KIND_YARN);
    scaling->set_factor(model.yarn->factor);
    scaling->set_original_max_position_embeddings(model.yarn->original_positions);
  }
  out.set_parameter_count(parameter_count);
  return out;
}

}  // namespace oom
