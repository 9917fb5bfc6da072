// Parameter units (architecture, idea 3): the embedding, a layer's ordinary parameters, a layer's
// experts, the head. A unit's tensors lie in canonical order, each starting at a multiple of
// kBlockElements, so that weight decay is uniform in a block. Everything that speaks of parameters
// (pools, chunks, graph, optimizer, checkpoints) uses these indices. Pure functions and values; no
// LibTorch.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/model/description.h"

namespace oom {

// Elements of one block: the granularity of decay, of the interleaved state and of the norm.
inline constexpr int64_t kBlockElements = 4096;

enum class UnitKind { kEmbedding, kLayer, kExperts, kHead };

// What a tensor is to its operator. A dense layer's MLP lies in the layer's unit (kDense*).
enum class TensorRole {
  kEmbedding,          // [V, H]
  kInputNorm,          // [H]
  kQuery,              // [heads*d, H]; with an output gate [heads*2d, H], by head [query | gate]
  kKey,                // [kv*d, H]
  kValue,              // [kv*d, H]
  kOutput,             // [H, heads*d]
  kQueryNorm,          // [d]
  kKeyNorm,            // [d]
  kDeltaMixed,         // [C, H], Gated DeltaNet: rows of q, then k, then v
  kDeltaGate,          // [N*V, H]
  kDeltaBeta,          // [N, H]
  kDeltaDecay,         // [N, H]
  kDeltaTaps,          // [C, 1, taps]
  kDeltaALog,          // [N]
  kDeltaDtBias,        // [N]
  kDeltaNorm,          // [V]
  kDeltaOutput,        // [H, N*V]
  kMixerOutputNorm,    // [H], of what the mixer gives (branch norms)
  kPostNorm,           // [H]
  kRouter,             // [E, H]
  kRouterScale,        // [H], of the router's normed input
  kExpertScale,        // [E], of the combine weights
  kSharedGateUp,       // [2Is, H]
  kSharedDown,         // [H, Is]
  kSharedGate,         // [1, H]
  kDenseGateUp,        // [2I, H], rows 0..I-1 gate
  kDenseDown,          // [H, I]
  kDenseOutputNorm,    // [H]
  kExpertsNorm,        // [H]
  kExpertsOutputNorm,  // [H]
  kMixtureOutputNorm,  // [H]
  kLayerScale,         // [1]; has no gradient, hence never changes
  kExpertsGateUp,      // [E, 2I, H], rows 0..I-1 of an expert gate
  kExpertsDown,        // [E, H, I]
  kFinalNorm,          // [H]
  kHead,               // [V, H]
};

struct TensorSpec {
  TensorRole role;
  std::string name;  // Canonical, unique in the model: "layers.3.experts.gate_up".
  std::vector<int64_t> shape;
  int64_t elements = 0;         // Product of shape.
  int64_t offset_elements = 0;  // Of its first element in the unit; a multiple of kBlockElements.
  bool decayed = true;          // Weight decay applies (engine rules, section 14).
};

struct ParameterUnit {
  UnitKind kind;
  int64_t index = 0;   // Position in the model's unit list.
  int64_t layer = -1;  // For kLayer and kExperts.
  std::string name;    // "embedding", "layers.3", "layers.3.experts", "head".
  std::vector<TensorSpec> tensors;
  int64_t elements = 0;    // With padding: a multiple of kBlockElements * rank_count.
  int64_t parameters = 0;  // Without padding.

  // REQUIRES: a tensor with that role exists.
  const TensorSpec& tensor(TensorRole role) const;
  bool has(TensorRole role) const;
};

// Units in the order of first use: embedding, then for each layer its ordinary unit and (routed
// layers only) its experts unit, then the head. `rank_count` pads each unit so that chunks divide
// evenly. A tied head has no kHead tensor in the head unit (only the final norm).
std::vector<ParameterUnit> BuildUnits(const ModelDescription& model, int rank_count);

// A tensor of the Hugging Face files: a contiguous range of one canonical tensor.
struct FileTensor {
  std::string name;  // "model.layers.0.mlp.experts.5.gate_proj.weight"
  std::vector<int64_t> shape;
  int64_t unit = 0;             // Index into BuildUnits().
  int64_t tensor = 0;           // Index into that unit's tensors.
  int64_t offset_elements = 0;  // Within the tensor.
  int64_t elements = 0;
};

// What differs between the files of one family: the published ones, and those that transformers
// saves from a class without the other towers.
struct NameLayout {
  std::string prefix =
      "model.";                 // Of all but the head; of multimodal files "model.language_model.".
  bool packed_experts = false;  // All experts of a layer in one tensor.

  bool operator==(const NameLayout&) const = default;
};

// As a text-only checkpoint of the family has it.
NameLayout DefaultLayout(Family family);

// Every tensor that training touches, under its published name (models reference, sections 2 to 6).
std::vector<FileTensor> PublishedTensors(const ModelDescription& model,
                                         const std::vector<ParameterUnit>& units,
                                         const NameLayout& layout);
std::vector<FileTensor> PublishedTensors(const ModelDescription& model,
                                         const std::vector<ParameterUnit>& units);

// Parameters without padding.
int64_t ParameterCount(const std::vector<ParameterUnit>& units);

}  // namespace oom
