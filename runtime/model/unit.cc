#include "runtime/model/unit.h"

#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

// Norms are the only tensors of these families that are not decayed; embedding, head and router
// matrices are (engine rules, section 14). By role, never by the number of dimensions.
bool Decayed(TensorRole role) {
  switch (role) {
    case TensorRole::kInputNorm:
    case TensorRole::kQueryNorm:
    case TensorRole::kKeyNorm:
    case TensorRole::kPostNorm:
    case TensorRole::kFinalNorm:
      return false;
    case TensorRole::kEmbedding:
    case TensorRole::kQuery:
    case TensorRole::kKey:
    case TensorRole::kValue:
    case TensorRole::kOutput:
    case TensorRole::kRouter:
    case TensorRole::kDenseGateUp:
    case TensorRole::kDenseDown:
    case TensorRole::kExpertsGateUp:
    case TensorRole::kExpertsDown:
    case TensorRole::kHead:
      return true;
  }
  OOM_CHECK_MSG(false, "unknown tensor role");
}

// Adds tensors to one unit and lays them out.
class UnitBuilder {
 public:
  UnitBuilder(UnitKind kind, int64_t layer, std::string name) {
    unit_.kind = kind;
    unit_.layer = layer;
    unit_.name = std::move(name);
  }

  void Add(TensorRole role, const std::string& name, std::vector<int64_t> shape) {
    TensorSpec spec;
    spec.role = role;
    spec.name = name;
    spec.shape = std::move(shape);
    spec.elements = 1;
    for (const int64_t dimension : spec.shape) spec.elements *= dimension;
    spec.offset_elements = RoundUp(end_elements_, kBlockElements);
    spec.decayed = Decayed(role);
    end_elements_ = spec.offset_elements + spec.elements;
    unit_.parameters += spec.elements;
    unit_.tensors.push_back(std::move(spec));
  }

  ParameterUnit Finish(int rank_count) && {
    unit_.elements = RoundUp(end_elements_, kBlockElements * rank_count);
    return std::move(unit_);
  }

 private:
  ParameterUnit unit_;
  int64_t end_elements_ = 0;
};

ParameterUnit BuildLayer(const ModelDescription& model, int64_t layer, int rank_count) {
  const std::string name = "layers." + std::to_string(layer);
  const std::string prefix = name + ".";
  const int64_t hidden = model.hidden_size;
  const int64_t query = model.query_head_count * model.head_size;
  const int64_t kv = model.kv_head_count * model.head_size;
  UnitBuilder builder(UnitKind::kLayer, layer, name);
  builder.Add(TensorRole::kInputNorm, prefix + "input_norm", {hidden});
  builder.Add(TensorRole::kQuery, prefix + "query", {query, hidden});
  builder.Add(TensorRole::kKey, prefix + "key", {kv, hidden});
  builder.Add(TensorRole::kValue, prefix + "value", {kv, hidden});
  builder.Add(TensorRole::kOutput, prefix + "output", {hidden, query});
  if (model.query_key_norm) {
    builder.Add(TensorRole::kQueryNorm, prefix + "query_norm", {model.head_size});
    builder.Add(TensorRole::kKeyNorm, prefix + "key_norm", {model.head_size});
  }
  builder.Add(TensorRole::kPostNorm, prefix + "post_norm", {hidden});
  if (model.mixtures[static_cast<size_t>(layer)] == MixtureKind::kRoutedExperts) {
    builder.Add(TensorRole::kRouter, prefix + "router", {model.expert_count, hidden});
  } else {
    builder.Add(TensorRole::kDenseGateUp, prefix + "dense.gate_up",
                {2 * model.dense_width, hidden});
    builder.Add(TensorRole::kDenseDown, prefix + "dense.down", {hidden, model.dense_width});
  }
  return std::move(builder).Finish(rank_count);
}

ParameterUnit BuildExperts(const ModelDescription& model, int64_t layer, int rank_count) {
  const std::string name = "layers." + std::to_string(layer) + ".experts";
  const int64_t count = model.expert_count;
  UnitBuilder builder(UnitKind::kExperts, layer, name);
  builder.Add(TensorRole::kExpertsGateUp, name + ".gate_up",
              {count, 2 * model.expert_width, model.hidden_size});
  builder.Add(TensorRole::kExpertsDown, name + ".down",
              {count, model.hidden_size, model.expert_width});
  return std::move(builder).Finish(rank_count);
}

}  // namespace

bool ParameterUnit::has(TensorRole role) const {
  for (const TensorSpec& spec : tensors) {
    if (spec.role == role) return true;
  }
  return false;
}

const TensorSpec& ParameterUnit::tensor(TensorRole role) const {
  for (const TensorSpec& spec : tensors) {
    if (spec.role == role) return spec;
  }
  OOM_CHECK_MSG(false, "the unit has no tensor with this role");
}

std::vector<ParameterUnit> BuildUnits(const ModelDescription& model, int rank_count) {
  OOM_CHECK(rank_count > 0);
  OOM_CHECK(static_cast<int64_t>(model.mixtures.size()) == model.layer_count);
  std::vector<ParameterUnit> units;
  UnitBuilder embedding(UnitKind::kEmbedding, -1, "embedding");
  embedding.Add(TensorRole::kEmbedding, "embedding", {model.vocabulary_size, model.hidden_size});
  units.push_back(std::move(embedding).Finish(rank_count));
  for (int64_t layer = 0; layer < model.layer_count; ++layer) {
    units.push_back(BuildLayer(model, layer, rank_count));
    if (model.mixtures[static_cast<size_t>(layer)] == MixtureKind::kRoutedExperts) {
      units.push_back(BuildExperts(model, layer, rank_count));
    }
  }
  UnitBuilder head(UnitKind::kHead, -1, "head");
  head.Add(TensorRole::kFinalNorm, "final_norm", {model.hidden_size});
  if (!model.tied_embedding) {
    head.Add(TensorRole::kHead, "head", {model.vocabulary_size, model.hidden_size});
  }
  units.push_back(std::move(head).Finish(rank_count));
  for (size_t i = 0; i < units.size(); ++i) units[i].index = static_cast<int64_t>(i);
  return units;
}

int64_t ParameterCount(const std::vector<ParameterUnit>& units) {
  int64_t count = 0;
  for (const ParameterUnit& unit : units) count += unit.parameters;
  return count;
}

}  // namespace oom
