// ModelDescription is a model as data: what the operators, the units and the checkpoint names are
// derived from. A decoder layer is a mixer (attention or Gated DeltaNet) and a mixture (routed
// experts, a dense MLP, or both). Read from a Hugging Face config.json by model/hf_config.h. Value
// types; no LibTorch.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/model/yarn.h"

namespace oom {

enum class Family { kMixtral, kQwen3Moe, kQwen35Moe, kGemma4 };

// bfloat16: working weights BF16, FP32 masters split (engine rules, section 1). float32: the
// working weights are the FP32 masters; compute and gradients are FP32.
enum class Precision { kBfloat16, kFloat32 };

// What RMSNorm multiplies xh = x / rms(x) by, and how it rounds (models reference, 1.1).
enum class NormScale {
  kWeightAfterRounding,  // w, xh rounded to the activations' type before it.
  kWeight,               // w; the product is rounded once.
  kOnePlusWeight,        // 1 + w; the product is rounded once.
};

struct NormRule {
  double epsilon = 1e-6;
  NormScale scale = NormScale::kWeightAfterRounding;

  bool operator==(const NormRule&) const = default;
};

enum class Activation { kSilu, kGeluTanh };

// Of a head's first `size` elements the pairs (i, i + size / 2), i < pair_count, turn by the angle
// position * theta^(-2i / size); the other elements stay.
struct RotaryRule {
  double theta = 1e6;
  int64_t size = 0;
  int64_t pair_count = 0;
  std::optional<YarnScaling> yarn;  // Absent: plain.

  bool operator==(const RotaryRule&) const = default;
};

struct AttentionDescription {
  int64_t query_head_count = 0;
  int64_t kv_head_count = 0;
  int64_t head_size = 0;
  bool query_key_norm = false;  // RMSNorm over each head before the rotary embedding.
  bool value_norm = false;      // RMSNorm without weight over each head's values.
  bool key_is_value = false;    // No value projection: values are the key projection's rows.
  bool output_gate = false;     // The query projection's rows are by head [query | gate].
  double score_scale = 0.0;     // Of the scores; 0: head_size^(-1/2).
  int64_t sliding_window = 0;   // 0: full causal attention.
  RotaryRule rotary;

  int64_t query_width() const { return query_head_count * head_size; }
  int64_t kv_width() const { return kv_head_count * head_size; }
  bool operator==(const AttentionDescription&) const = default;
};

struct DeltaNetDescription {
  int64_t key_head_count = 0;
  int64_t value_head_count = 0;  // A multiple of key_head_count.
  int64_t key_head_size = 0;
  int64_t value_head_size = 0;
  int64_t tap_count = 0;  // Of the convolution.

  int64_t key_width() const { return key_head_count * key_head_size; }
  int64_t value_width() const { return value_head_count * value_head_size; }
  int64_t channel_count() const { return 2 * key_width() + value_width(); }
  bool operator==(const DeltaNetDescription&) const = default;
};

enum class MixerKind { kAttention, kDeltaNet };

enum class MixtureKind {
  kRoutedExperts,
  kDense,
  kRoutedAndShared,  // Beside the routed experts one for all tokens, behind a gate of its own.
  kRoutedAndDense,   // A dense MLP and the experts, each between norms of its own.
};

inline bool HasExperts(MixtureKind kind) { return kind != MixtureKind::kDense; }

struct LayerDescription {
  MixerKind mixer = MixerKind::kAttention;
  AttentionDescription attention;  // Of kAttention.
  DeltaNetDescription delta_net;   // Of kDeltaNet.
  MixtureKind mixture = MixtureKind::kRoutedExperts;

  bool operator==(const LayerDescription&) const = default;
};

struct ModelDescription {
  Family family = Family::kQwen3Moe;
  int64_t hidden_size = 0;
  int64_t vocabulary_size = 0;
  int64_t expert_count = 0;
  int64_t experts_per_token = 0;
  int64_t expert_width = 0;  // Intermediate size of one routed expert.
  int64_t shared_width = 0;  // Of the shared expert; 0 if there is none.
  int64_t dense_width = 0;   // Of a dense MLP; 0 if there is none.
  Activation activation = Activation::kSilu;
  bool renormalize_top_k = true;
  NormRule norm;  // Of every norm but Gated DeltaNet's.
  bool branch_norms =
      false;  // Norms on what mixer and mixture give, and a scale of the layer's result.
  double embedding_scale = 1.0;
  double logit_cap = 0.0;  // C of C * tanh(logit / C); 0: none.
  int64_t max_positions = 0;
  bool tied_embedding = false;
  double initializer_range = 0.02;
  std::vector<LayerDescription> layers;

  int64_t layer_count() const { return static_cast<int64_t>(layers.size()); }
  const LayerDescription& layer(int64_t index) const { return layers[static_cast<size_t>(index)]; }
  // Of all attention layers alike; null where there are none.
  const RotaryRule* rotary() const;
  std::optional<YarnScaling> yarn() const;
  void set_yarn(const std::optional<YarnScaling>& yarn);
  bool operator==(const ModelDescription&) const = default;
};

}  // namespace oom
