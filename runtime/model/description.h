// ModelDescription is a model family as data: what the operators, the units and the checkpoint names
// are derived from. A decoder layer is a mixer (attention) and a mixture (routed experts, or a dense
// MLP). Read from a Hugging Face config.json by model/hf_config.h. Value type; no LibTorch.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/model/yarn.h"

namespace oom {

enum class Family { kMixtral, kQwen3Moe };

// bfloat16: working weights BF16, FP32 masters split (engine rules, section 1). float32: the working
// weights are the FP32 masters; compute and gradients are FP32.
enum class Precision { kBfloat16, kFloat32 };

enum class MixtureKind { kRoutedExperts, kDense };

struct ModelDescription {
  Family family = Family::kQwen3Moe;
  int64_t hidden_size = 0;
  int64_t layer_count = 0;
  int64_t vocabulary_size = 0;
  int64_t query_head_count = 0;
  int64_t kv_head_count = 0;
  int64_t head_size = 0;
  int64_t expert_count = 0;
  int64_t experts_per_token = 0;
  int64_t expert_width = 0;         // Intermediate size of one routed expert.
  int64_t dense_width = 0;          // Intermediate size of a dense layer's MLP; 0 if there is none.
  bool query_key_norm = false;      // Qwen3: RMSNorm over each head before the rotary embedding.
  bool renormalize_top_k = true;    // norm_topk_prob; Mixtral always renormalises.
  double rms_epsilon = 1e-6;
  double rope_theta = 1e6;
  int64_t sliding_window = 0;       // 0: full causal attention.
  int64_t max_positions = 0;
  bool tied_embedding = false;
  double initializer_range = 0.02;
  std::vector<MixtureKind> mixtures;  // One a layer.
  std::optional<YarnScaling> yarn;    // Of the rotary embedding; absent: plain.
};

}  // namespace oom
