// The published tensor names (models reference, sections 2 to 6): which file tensor is which range
// of which canonical tensor.

#include <string>
#include <string_view>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/model/unit.h"

namespace oom {
namespace {

// Where a family's routed mixture lies in a layer, and how the parts of one expert are called.
// Apart from that and from Gemma 4's norms, what two families share is named alike in both.
struct MixtureNames {
  std::string_view router;   // "mlp.gate.weight"
  std::string_view experts;  // "mlp.experts."
  std::string_view gate, up, down;
};

MixtureNames NamesOf(Family family) {
  switch (family) {
    case Family::kMixtral:
      return {"block_sparse_moe.gate.weight", "block_sparse_moe.experts.", "w1", "w3", "w2"};
    case Family::kQwen3Moe:
    case Family::kQwen35Moe:
      return {"mlp.gate.weight", "mlp.experts.", "gate_proj", "up_proj", "down_proj"};
    case Family::kGemma4:
      return {"router.proj.weight", "experts.", "gate_proj", "up_proj", "down_proj"};
  }
  OOM_CHECK_MSG(false, "unknown family");
}

// Of a canonical tensor that is one file tensor, after the layer's prefix; "" for one that is
// split.
std::string_view NameInLayer(Family family, TensorRole role) {
  const bool gemma = family == Family::kGemma4;
  switch (role) {
    case TensorRole::kInputNorm:
      return "input_layernorm.weight";
    case TensorRole::kQuery:
      return "self_attn.q_proj.weight";
    case TensorRole::kKey:
      return "self_attn.k_proj.weight";
    case TensorRole::kValue:
      return "self_attn.v_proj.weight";
    case TensorRole::kOutput:
      return "self_attn.o_proj.weight";
    case TensorRole::kQueryNorm:
      return "self_attn.q_norm.weight";
    case TensorRole::kKeyNorm:
      return "self_attn.k_norm.weight";
    case TensorRole::kDeltaMixed:
      return "linear_attn.in_proj_qkv.weight";
    case TensorRole::kDeltaGate:
      return "linear_attn.in_proj_z.weight";
    case TensorRole::kDeltaBeta:
      return "linear_attn.in_proj_b.weight";
    case TensorRole::kDeltaDecay:
      return "linear_attn.in_proj_a.weight";
    case TensorRole::kDeltaTaps:
      return "linear_attn.conv1d.weight";
    case TensorRole::kDeltaALog:
      return "linear_attn.A_log";
    case TensorRole::kDeltaDtBias:
      return "linear_attn.dt_bias";
    case TensorRole::kDeltaNorm:
      return "linear_attn.norm.weight";
    case TensorRole::kDeltaOutput:
      return "linear_attn.out_proj.weight";
    case TensorRole::kMixerOutputNorm:
      return "post_attention_layernorm.weight";
    case TensorRole::kPostNorm:
      return gemma ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight";
    case TensorRole::kRouter:
      return NamesOf(family).router;
    case TensorRole::kRouterScale:
      return "router.scale";
    case TensorRole::kExpertScale:
      return "router.per_expert_scale";
    case TensorRole::kSharedDown:
      return "mlp.shared_expert.down_proj.weight";
    case TensorRole::kSharedGate:
      return "mlp.shared_expert_gate.weight";
    case TensorRole::kDenseDown:
      return "mlp.down_proj.weight";
    case TensorRole::kDenseOutputNorm:
      return "post_feedforward_layernorm_1.weight";
    case TensorRole::kExpertsNorm:
      return "pre_feedforward_layernorm_2.weight";
    case TensorRole::kExpertsOutputNorm:
      return "post_feedforward_layernorm_2.weight";
    case TensorRole::kMixtureOutputNorm:
      return "post_feedforward_layernorm.weight";
    case TensorRole::kLayerScale:
      return "layer_scalar";
    case TensorRole::kSharedGateUp:
    case TensorRole::kDenseGateUp:
    case TensorRole::kExpertsGateUp:
    case TensorRole::kExpertsDown:
    case TensorRole::kEmbedding:
    case TensorRole::kFinalNorm:
    case TensorRole::kHead:
      return "";
  }
  OOM_CHECK_MSG(false, "unknown tensor role");
}

class Publisher {
 public:
  Publisher(const ModelDescription& model, const NameLayout& layout)
      : model_(model), layout_(layout) {}

  void Add(const ParameterUnit& unit, int64_t tensor) {
    const TensorSpec& spec = unit.tensors[static_cast<size_t>(tensor)];
    unit_ = unit.index;
    tensor_ = tensor;
    offset_elements_ = 0;
    if (unit.layer < 0) {
      AddOutside(spec);
    } else {
      AddInLayer(spec, layout_.prefix + "layers." + std::to_string(unit.layer) + ".");
    }
    OOM_CHECK(offset_elements_ == spec.elements);
  }

  std::vector<FileTensor> Take() && { return std::move(files_); }

 private:
  void AddOutside(const TensorSpec& spec) {
    switch (spec.role) {
      case TensorRole::kEmbedding:
        return AddRange(layout_.prefix + "embed_tokens.weight", spec.shape);
      case TensorRole::kFinalNorm:
        return AddRange(layout_.prefix + "norm.weight", spec.shape);
      case TensorRole::kHead:
        return AddRange("lm_head.weight", spec.shape);
      default:
        OOM_CHECK_MSG(false, "not a tensor outside the layers");
    }
  }

  void AddInLayer(const TensorSpec& spec, const std::string& layer) {
    const std::string_view whole = NameInLayer(model_.family, spec.role);
    if (!whole.empty()) return AddRange(layer + std::string(whole), spec.shape);
    if (spec.role == TensorRole::kDenseGateUp) {
      return AddGateUp(layer + "mlp.", model_.dense_width);
    }
    if (spec.role == TensorRole::kSharedGateUp) {
      return AddGateUp(layer + "mlp.shared_expert.", model_.shared_width);
    }
    AddExperts(spec, layer);
  }

  void AddGateUp(const std::string& mlp, int64_t width) {
    AddRange(mlp + "gate_proj.weight", {width, model_.hidden_size});
    AddRange(mlp + "up_proj.weight", {width, model_.hidden_size});
  }

  void AddExperts(const TensorSpec& spec, const std::string& layer) {
    const MixtureNames names = NamesOf(model_.family);
    const std::string experts = layer + std::string(names.experts);
    const bool gate_up = spec.role == TensorRole::kExpertsGateUp;
    if (layout_.packed_experts) {
      return AddRange(experts + (gate_up ? "gate_up_proj" : "down_proj"), spec.shape);
    }
    for (int64_t expert = 0; expert < model_.expert_count; ++expert) {
      const std::string prefix = experts + std::to_string(expert) + ".";
      if (gate_up) {
        const std::vector<int64_t> shape = {model_.expert_width, model_.hidden_size};
        AddRange(prefix + std::string(names.gate) + ".weight", shape);
        AddRange(prefix + std::string(names.up) + ".weight", shape);
      } else {
        AddRange(prefix + std::string(names.down) + ".weight",
                 {model_.hidden_size, model_.expert_width});
      }
    }
  }

  // The next elements of the canonical tensor.
  void AddRange(std::string name, std::vector<int64_t> shape) {
    FileTensor file;
    file.name = std::move(name);
    file.shape = std::move(shape);
    file.unit = unit_;
    file.tensor = tensor_;
    file.offset_elements = offset_elements_;
    file.elements = 1;
    for (const int64_t dimension : file.shape) file.elements *= dimension;
    offset_elements_ += file.elements;
    files_.push_back(std::move(file));
  }

  const ModelDescription& model_;
  const NameLayout& layout_;
  std::vector<FileTensor> files_;
  int64_t unit_ = 0;
  int64_t tensor_ = 0;
  int64_t offset_elements_ = 0;
};

}  // namespace

NameLayout DefaultLayout(Family family) {
  return {.packed_experts = family == Family::kQwen35Moe || family == Family::kGemma4};
}

std::vector<FileTensor> PublishedTensors(const ModelDescription& model,
                                         const std::vector<ParameterUnit>& units,
                                         const NameLayout& layout) {
  Publisher publisher(model, layout);
  for (const ParameterUnit& unit : units) {
    for (size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
      publisher.Add(unit, static_cast<int64_t>(tensor));
    }
  }
  return std::move(publisher).Take();
}

std::vector<FileTensor> PublishedTensors(const ModelDescription& model,
                                         const std::vector<ParameterUnit>& units) {
  return PublishedTensors(model, units, DefaultLayout(model.family));
}

}  // namespace oom
