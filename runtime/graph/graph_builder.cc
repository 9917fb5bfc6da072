#include "runtime/graph/graph_builder.h"

#include <algorithm>
#include <map>

#include "runtime/base/check.h"
#include "runtime/graph/boundary_schedule.h"
#include "runtime/graph/gradient_nodes.h"
#include "runtime/graph/graph_assembly.h"
#include "runtime/graph/window_set.h"

namespace oom {
namespace {

class GraphBuilder {
 public:
  explicit GraphBuilder(const GraphInputs& inputs)
      : model_(*inputs.model),
        plan_(*inputs.plan),
        layout_(*inputs.layout),
        batch_(inputs.batch),
        boundaries_(model_, plan_),
        windows_(plan_.window_count()),
        gradient_buffers_(plan_.gradient_buffer_count()),
        gradients_(plan_, layout_, &assembly_) {
    for (const ParameterUnit& unit : layout_.units()) {
      switch (unit.kind) {
        case UnitKind::kEmbedding: embedding_ = unit.index; break;
        case UnitKind::kHead: head_ = unit.index; break;
        case UnitKind::kLayer: layer_unit_[unit.layer] = unit.index; break;
        case UnitKind::kExperts: experts_unit_[unit.layer] = unit.index; break;
      }
    }
  }

  StepGraph Training() {
    for (int step = 0; step < 2; ++step) {
      BeginStep();
      for (int a = 0; a < plan_.accumulation(); ++a) {
        assembly_.BeginMicroBatch(a);
        Forward(/*keep=*/true);
        Head();
        for (int64_t layer = model_.layer_count() - 1; layer >= 0; --layer) Backward(layer);
        EmbeddingBackward();
      }
      gradients_.Updates();
    }
    return Take();
  }

  StepGraph Evaluation() {
    for (int step = 0; step < 2; ++step) {
      BeginStep();
      Forward(/*keep=*/false);
      const int64_t window = Load(head_);
      const int64_t tied = model_.tied_embedding ? Load(embedding_) : -1;
      Node& node = Add(NodeKind::kEvaluationHead, Resource::kCompute);
      node.unit = head_;
      node.weights = window;
      node.mixture_weights = tied;
      Read(window);
      Read(tied);
      Read(Activation(model_.layer_count()));
    }
    return Take();
  }

 private:
  void BeginStep() {
    assembly_.BeginStep();
    windows_.BeginStep();
    gradient_buffers_.BeginStep();
    gradients_.BeginStep();
  }

  Node& Add(NodeKind kind, Resource resource) { return assembly_.Add(kind, resource); }
  int64_t BufferIndex(const std::string& name, Space space, int64_t bytes) {
    return assembly_.BufferIndex(name, space, bytes);
  }
  void Read(int64_t buffer) { assembly_.Read(buffer); }
  void Write(int64_t buffer) { assembly_.Write(buffer); }

  // ---- names of buffers ----
  int64_t TokenBytes() const {
    return batch_.micro_batch_tokens() * model_.hidden_size * layout_.activation_bytes();
  }
  // The input of layer `layer` while it travels between nodes. The gathered rows are the plan's, all others are taken
  // by the operators: no bytes here.
  int64_t Activation(int64_t layer) {
    return BufferIndex("activation." + std::to_string(layer), Space::kDevice,
                       layer == 0 ? TokenBytes() : 0);
  }
  int64_t HostBoundary(int64_t layer) {
    return BufferIndex("boundary.host." + std::to_string(layer), Space::kHost, TokenBytes());
  }
  int64_t BoundaryIn(int64_t layer) {
    const auto slot = layer % plan_.boundary_buffer_count();
    return BufferIndex("boundary.in." + std::to_string(slot), Space::kDevice,
                       boundaries_.taken_on_demand() ? 0 : TokenBytes());
  }
  // What backward of a layer's part needs, between replay (or forward) and backward.
  int64_t Saved(int64_t layer, const char* part) {
    return BufferIndex("saved." + std::string(part) + "." + std::to_string(layer), Space::kDevice, 0);
  }
  v1::LayerPlan LayerPlanOf(int64_t layer) const { return plan_.layers(static_cast<int>(layer)); }
  // The experts of a routed layer; a dense layer's mixture lies in the layer's unit.
  int64_t MixtureUnit(int64_t layer) const {
    const auto found = experts_unit_.find(layer);
    return found == experts_unit_.end() ? layer_unit_.at(layer) : found->second;
  }

  // ---- parts of a step ----
  // Makes the unit's weights readable by the next compute node; returns the buffer that holds them.
  int64_t Load(int64_t unit) {
    if (layout_.used_in_place(unit)) return gradients_.WeightsInPlace(unit);
    const ParameterUnit& description = layout_.units()[unit];
    const int64_t bytes = description.elements * layout_.weight_bytes();
    const WindowSet::Slot slot = windows_.Take(description.kind, unit);
    const int64_t window = BufferIndex(slot.name, Space::kDevice, bytes);
    if (slot.holds_unit) return window;
    Node& node = Add(NodeKind::kLoadUnit,
                     layout_.resident(unit) ? Resource::kCollective : Resource::kHostToDevice);
    const int64_t slice_bytes = bytes / layout_.rank_count();
    node.unit = unit;
    node.layer = description.layer;
    node.buffer = window;
    node.bytes = layout_.sharded(unit) ? slice_bytes : bytes;
    Write(window);
    gradients_.AfterUpdatesOf(unit);
    if (!layout_.sharded(unit)) return window;
    Node& gather = Add(NodeKind::kGatherUnit, Resource::kCollective);
    gather.unit = unit;
    gather.layer = description.layer;
    gather.buffer = window;
    gather.bytes = bytes - slice_bytes;
    Write(window);
    return window;
  }

  // Collectives have one order: what the layer below gets from other ranks is fetched before this one's gradients go,
  // else its weights would wait for this one's backward. With one window there is no place for it yet.
  void LoadAhead(int64_t layer) {
    if (layer < 0 || plan_.window_count() < 2) return;
    for (const int64_t unit : {layer_unit_.at(layer), MixtureUnit(layer)}) {
      if (layout_.sharded(unit) || (layout_.resident(unit) && !layout_.used_in_place(unit))) Load(unit);
    }
  }

  void ReadWeights(int64_t unit, int64_t buffer) {
    Read(buffer);
    if (layout_.used_in_place(unit)) gradients_.AfterUpdatesOf(unit);
  }

  void Forward(bool keep) {
    Node& gather = Add(NodeKind::kGatherRows, Resource::kHostToDevice);
    gather.unit = embedding_;
    gather.buffer = Activation(0);
    gather.bytes = layout_.resident(embedding_)
                       ? 0
                       : batch_.micro_batch_tokens() * model_.hidden_size * layout_.weight_bytes();
    Write(Activation(0));
    gradients_.AfterUpdatesOf(embedding_);
    for (int64_t layer = 0; layer < model_.layer_count(); ++layer) {
      const v1::LayerPlan layer_plan = LayerPlanOf(layer);
      if (keep && boundaries_.Returns(layer)) {
        Node& store = Add(NodeKind::kStoreBoundary, Resource::kBoundaryOut);
        store.layer = layer;
        store.unit = layer_unit_.at(layer);
        store.buffer = HostBoundary(layer);
        store.bytes = TokenBytes();
        Read(Activation(layer));
        Write(HostBoundary(layer));
      }
      const int64_t ordinary = layer_unit_.at(layer);
      const int64_t window = Load(ordinary);
      Node& mixer = Add(NodeKind::kForwardMixer, Resource::kCompute);
      mixer.layer = layer;
      mixer.unit = ordinary;
      mixer.weights = window;
      ReadWeights(ordinary, window);
      Read(Activation(layer));
      if (keep && layer_plan.retain_mixer()) Write(Saved(layer, "mixer"));

      const int64_t mixture_unit = MixtureUnit(layer);
      const int64_t experts = mixture_unit == ordinary ? window : Load(mixture_unit);
      Node& mixture = Add(NodeKind::kForwardMixture, Resource::kCompute);
      mixture.layer = layer;
      mixture.unit = mixture_unit;
      mixture.weights = window;
      mixture.mixture_weights = experts;
      ReadWeights(ordinary, window);
      if (mixture_unit != ordinary) ReadWeights(mixture_unit, experts);
      if (keep && layer_plan.retain_mixture()) Write(Saved(layer, "mixture"));
      Write(Activation(layer + 1));
    }
    if (keep) TakeBoundaries(model_.layer_count());
  }

  // The last node is compute's last of forward (`layer`: the number of layers) or of a layer's backward.
  void TakeBoundaries(int64_t layer) {
    assembly_.last_node().takes = boundaries_.TakenBehind(layer);
    for (const int64_t below : assembly_.last_node().takes) boundary_taken_[below] = assembly_.last();
  }

  void Head() {
    const int64_t window = Load(head_);
    const int64_t tied = model_.tied_embedding ? Load(embedding_) : -1;
    const int64_t gradient = GradientBuffer(head_);
    const int64_t tied_gradient = model_.tied_embedding ? GradientBuffer(embedding_) : -1;
    Node& node = Add(NodeKind::kHead, Resource::kCompute);
    node.unit = head_;
    node.weights = window;
    node.mixture_weights = tied;
    node.gradient = gradient;
    node.mixture_gradient = tied_gradient;
    ReadWeights(head_, window);
    if (model_.tied_embedding) ReadWeights(embedding_, tied);
    Read(Activation(model_.layer_count()));
    Write(gradient);
    if (model_.tied_embedding) Write(tied_gradient);
    gradients_.SetLossNode();
    gradients_.Store(head_, gradient);
  }

  void Backward(int64_t layer) {
    const v1::LayerPlan layer_plan = LayerPlanOf(layer);
    const int64_t ordinary = layer_unit_.at(layer);
    const int64_t mixture_unit = MixtureUnit(layer);
    int64_t boundary = -1;
    if (boundaries_.Returns(layer)) {
      Node& load = Add(NodeKind::kLoadBoundary, Resource::kBoundaryIn);
      load.layer = layer;
      load.unit = ordinary;
      boundary = BoundaryIn(layer);
      load.buffer = boundary;
      load.bytes = TokenBytes();
      Read(HostBoundary(layer));
      Write(boundary);
      if (boundaries_.taken_on_demand()) assembly_.After(boundary_taken_.at(layer));
    }
    const int64_t window = Load(ordinary);
    const int64_t experts = mixture_unit == ordinary ? window : Load(mixture_unit);
    LoadAhead(layer - 1);
    if (!layer_plan.retain_mixer()) {
      Node& replay = Add(NodeKind::kReplayMixer, Resource::kCompute);
      replay.layer = layer;
      replay.unit = ordinary;
      replay.buffer = boundary;
      replay.weights = window;
      Read(boundary);
      Read(window);
      Write(Saved(layer, "mixer"));
    }
    if (!layer_plan.retain_mixture()) {
      Node& replay = Add(NodeKind::kReplayMixture, Resource::kCompute);
      replay.layer = layer;
      replay.unit = mixture_unit;
      replay.weights = window;
      replay.mixture_weights = experts;
      Read(window);
      if (experts != window) Read(experts);
      Write(Saved(layer, "mixture"));
    }
    const int64_t ordinary_gradient = GradientBuffer(ordinary);
    const int64_t mixture_gradient =
        mixture_unit == ordinary ? ordinary_gradient : GradientBuffer(mixture_unit);
    Node& mixture = Add(NodeKind::kBackwardMixture, Resource::kCompute);
    mixture.layer = layer;
    mixture.unit = mixture_unit;
    mixture.weights = window;
    mixture.mixture_weights = experts;
    mixture.gradient = ordinary_gradient;
    mixture.mixture_gradient = mixture_gradient;
    Read(window);
    if (experts != window) Read(experts);
    Read(Saved(layer, "mixture"));
    Write(ordinary_gradient);
    if (mixture_gradient != ordinary_gradient) {
      Write(mixture_gradient);
      gradients_.Store(mixture_unit, mixture_gradient);
    }
    Node& mixer = Add(NodeKind::kBackwardMixer, Resource::kCompute);
    mixer.layer = layer;
    mixer.unit = ordinary;
    mixer.weights = window;
    mixer.gradient = ordinary_gradient;
    Read(window);
    Read(boundary);
    Read(Saved(layer, "mixer"));
    Write(ordinary_gradient);
    TakeBoundaries(layer);
    gradients_.Store(ordinary, ordinary_gradient);
  }

  int64_t GradientBuffer(int64_t unit) {
    const ParameterUnit& description = layout_.units()[unit];
    const WindowSet::Slot slot = gradient_buffers_.Take(description.kind, unit);
    return BufferIndex("gradient." + slot.name, Space::kDevice, description.elements * 4);
  }

  // Added to what the head has put into the gradient, which then goes as any other.
  void TiedEmbeddingBackward() {
    const int64_t gradient = GradientBuffer(embedding_);
    Node& node = Add(NodeKind::kEmbeddingBackward, Resource::kCompute);
    node.unit = embedding_;
    node.gradient = gradient;
    Write(gradient);
    gradients_.Store(embedding_, gradient);
  }

  void EmbeddingBackward() {
    if (model_.tied_embedding) return TiedEmbeddingBackward();
    const int64_t rows = BufferIndex("gradient.rows", Space::kDevice, 0);
    Node& node = Add(NodeKind::kEmbeddingBackward, Resource::kCompute);
    node.unit = embedding_;
    Write(rows);
    if (assembly_.micro_batch() + 1 < plan_.accumulation()) return;
    gradients_.StoreRows(embedding_, rows);
  }

  StepGraph Take() {
    StepGraph graph = assembly_.Take();
    // Host pools: their sizes say where chunks and backlog slots lie, which everyone has to agree on.
    for (const PoolSpec& pool : layout_.pools()) {
      if (pool.name.rfind("device.", 0) == 0) continue;
      graph.buffers.push_back(
          {.name = "pool." + pool.name, .space = Space::kHost, .bytes = pool.bytes});
    }
    return graph;
  }

  const ModelDescription& model_;
  const v1::Plan& plan_;
  const SharedLayout& layout_;
  const BatchShape batch_;
  const BoundarySchedule boundaries_;
  WindowSet windows_;
  WindowSet gradient_buffers_;
  int64_t embedding_ = -1;
  int64_t head_ = -1;
  std::map<int64_t, int64_t> layer_unit_;
  std::map<int64_t, int64_t> experts_unit_;
  std::map<int64_t, int64_t> boundary_taken_;  // Layer to the node behind which its place is taken.

  GraphAssembly assembly_;
  GradientNodes gradients_;
};

}  // namespace

StepGraph BuildTrainingGraph(const GraphInputs& inputs) { return GraphBuilder(inputs).Training(); }

StepGraph BuildEvaluationGraph(const GraphInputs& inputs) {
  return GraphBuilder(inputs).Evaluation();
}

}  // namespace oom
