// The published tensor names (models reference, sections 2 and 3): which file tensor is which range
// of which canonical tensor.

#include <string>
#include <string_view>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/model/unit.h"

namespace oom {
namespace {

// Names of a family's routed mixture. Everything else is named alike in both families.
struct MixtureNames {
  std::string_view folder;
  std::string_view gate, up, down;
};

MixtureNames NamesOf(Family family) {
  switch (family) {
    case Family::kMixtral:
      return {"block_sparse_moe", "w1", "w3", "w2"};
    case Family::kQwen3Moe:
      return {"mlp", "gate_proj", "up_proj", "down_proj"};
  }
  OOM_CHECK_MSG(false, "unknown family");
}

// A canonical tensor that is one file tensor, or "" for one that is split (Dense*, Experts*).
std::string WholeName(const ModelDescription& model, TensorRole role, const std::string& layer) {
  switch (role) {
    case TensorRole::kEmbedding:
      return "model.embed_tokens.weight";
    case TensorRole::kInputNorm:
      return layer + "input_layernorm.weight";
    case TensorRole::kQuery:
      return layer + "self_attn.q_proj.weight";
    case TensorRole::kKey:
      return layer + "self_attn.k_proj.weight";
    case TensorRole::kValue:
      return layer + "self_attn.v_proj.weight";
    case TensorRole::kOutput:
      return layer + "self_attn.o_proj.weight";
    case TensorRole::kQueryNorm:
      return layer + "self_attn.q_norm.weight";
    case TensorRole::kKeyNorm:
      return layer + "self_attn.k_norm.weight";
    case TensorRole::kPostNorm:
      return layer + "post_attention_layernorm.weight";
    case TensorRole::kRouter:
      return layer + std::string(NamesOf(model.family).folder) + ".gate.weight";
    case TensorRole::kDenseDown:
      return layer + "mlp.down_proj.weight";
    case TensorRole::kFinalNorm:
      return "model.norm.weight";
    case TensorRole::kHead:
      return "lm_head.weight";
    case TensorRole::kDenseGateUp:
    case TensorRole::kExpertsGateUp:
    case TensorRole::kExpertsDown:
      return "";
  }
  OOM_CHECK_MSG(false, "unknown tensor role");
}

class Publisher {
 public:
  explicit Publisher(const ModelDescription& model) : model_(model) {}

  void Add(const ParameterUnit& unit, int64_t tensor) {
    const TensorSpec& spec = unit.tensors[static_cast<size_t>(tensor)];
    const std::string layer =
        unit.layer < 0 ? "" : "model.layers." + std::to_string(unit.layer) + ".";
    unit_ = unit.index;
    tensor_ = tensor;
    offset_elements_ = 0;
    const std::string whole = WholeName(model_, spec.role, layer);
    if (!whole.empty()) {
      AddRange(whole, spec.shape);
    } else if (spec.role == TensorRole::kDenseGateUp) {
      AddRange(layer + "mlp.gate_proj.weight", {model_.dense_width, model_.hidden_size});
      AddRange(layer + "mlp.up_proj.weight", {model_.dense_width, model_.hidden_size});
    } else {
      AddExperts(spec, layer);
    }
    OOM_CHECK(offset_elements_ == spec.elements);
  }

  std::vector<FileTensor> Take() && { return std::move(files_); }

 private:
  void AddExperts(const TensorSpec& spec, const std::string& layer) {
    const MixtureNames names = NamesOf(model_.family);
    const std::string experts = layer + std::string(names.folder) + ".experts.";
    for (int64_t expert = 0; expert < model_.expert_count; ++expert) {
      const std::string prefix = experts + std::to_string(expert) + ".";
      if (spec.role == TensorRole::kExpertsGateUp) {
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
  std::vector<FileTensor> files_;
  int64_t unit_ = 0;
  int64_t tensor_ = 0;
  int64_t offset_elements_ = 0;
};

}  // namespace

std::vector<FileTensor> PublishedTensors(const ModelDescription& model,
                                         const std::vector<ParameterUnit>& units) {
  Publisher publisher(model);
  for (const ParameterUnit& unit : units) {
    for (size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
      publisher.Add(unit, static_cast<int64_t>(tensor));
    }
  }
  return std::move(publisher).Take();
}

}  // namespace oom
