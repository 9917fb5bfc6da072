#include "runtime/graph/graph_builder.h"

#include <algorithm>
#include <map>

#include "runtime/base/check.h"
#include "runtime/graph/graph_assembly.h"
#include "runtime/graph/window_set.h"

namespace oom {
namespace {

// Slices of gradients on their way from the devices' sum to where they are updated.
constexpr int64_t kReducedSlots = 4;

class GraphBuilder {
 public:
  explicit GraphBuilder(const GraphInputs& inputs)
      : model_(*inputs.model),
        plan_(*inputs.plan),
        layout_(*inputs.layout),
        batch_(inputs.batch),
        windows_(plan_.window_count()),
        gradients_(plan_.gradient_buffer_count()) {
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
        micro_batch_ = a;
        Forward(/*keep=*/true);
        Head();
        for (int64_t layer = model_.layer_count() - 1; layer >= 0; --layer) Backward(layer);
        EmbeddingBackward();
      }
      Updates();
    }
    return Take();
  }

  StepGraph Evaluation() {
    for (int step = 0; step < 2; ++step) {
      BeginStep();
      micro_batch_ = 0;
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
    gradients_.BeginStep();
    stores_.clear();
    landed_.clear();
    loss_node_ = -1;
    reduced_ = 0;
  }

  Node& Add(NodeKind kind, Resource resource) { return assembly_.Add(kind, resource, micro_batch_); }
  int64_t last() const { return assembly_.last(); }
  void After(int64_t predecessor) { assembly_.After(predecessor); }
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
    return BufferIndex("boundary.in." + std::to_string(slot), Space::kDevice, TokenBytes());
  }
  // What backward of a layer's part needs, between replay (or forward) and backward.
  int64_t Saved(int64_t layer, const char* part) {
    return BufferIndex("saved." + std::string(part) + "." + std::to_string(layer), Space::kDevice, 0);
  }
  int64_t Weights(int64_t unit) {
    return BufferIndex("resident." + layout_.units()[unit].name, Space::kDevice, 0);
  }

  v1::LayerPlan LayerPlanOf(int64_t layer) const { return plan_.layers(static_cast<int>(layer)); }
  bool OnHost(int64_t layer) const {
    return LayerPlanOf(layer).boundary() == v1::BOUNDARY_HOME_HOST;
  }
  // Only the replay of the mixer reads the layer's input again.
  bool NeedsBoundary(int64_t layer) const {
    return !LayerPlanOf(layer).retain_mixer();
  }
  bool UsedInPlace(int64_t unit) const { return layout_.resident(unit) && layout_.rank_count() == 1; }
  // The experts of a routed layer; a dense layer's mixture lies in the layer's unit.
  int64_t MixtureUnit(int64_t layer) const {
    const auto found = experts_unit_.find(layer);
    return found == experts_unit_.end() ? layer_unit_.at(layer) : found->second;
  }

  // ---- parts of a step ----
  // Makes the unit's weights readable by the next compute node; returns the buffer that holds them.
  int64_t Load(int64_t unit) {
    if (UsedInPlace(unit)) return Weights(unit);
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
    AfterUpdatesOf(unit);
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
      if (layout_.sharded(unit) || (layout_.resident(unit) && !UsedInPlace(unit))) Load(unit);
    }
  }

  // The last node needs the unit's newest version: updates of the step before.
  void AfterUpdatesOf(int64_t unit) {
    for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
      const auto update = updates_.find(c);
      if (update != updates_.end() && update->second < assembly_.step_begin()) After(update->second);
    }
  }

  void ReadWeights(int64_t unit, int64_t buffer) {
    Read(buffer);
    if (UsedInPlace(unit)) AfterUpdatesOf(unit);
  }

  void Forward(bool keep) {
    Node& gather = Add(NodeKind::kGatherRows, Resource::kHostToDevice);
    gather.unit = embedding_;
    gather.buffer = Activation(0);
    gather.bytes = layout_.resident(embedding_)
                       ? 0
                       : batch_.micro_batch_tokens() * model_.hidden_size * layout_.weight_bytes();
    Write(Activation(0));
    AfterUpdatesOf(embedding_);
    for (int64_t layer = 0; layer < model_.layer_count(); ++layer) {
      const v1::LayerPlan layer_plan = LayerPlanOf(layer);
      if (keep && OnHost(layer) && NeedsBoundary(layer)) {
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
    loss_node_ = last();
    StoreGradients(head_, gradient);
  }

  void Backward(int64_t layer) {
    const v1::LayerPlan layer_plan = LayerPlanOf(layer);
    const int64_t ordinary = layer_unit_.at(layer);
    const int64_t mixture_unit = MixtureUnit(layer);
    int64_t boundary = -1;
    if (NeedsBoundary(layer) && OnHost(layer)) {
      Node& load = Add(NodeKind::kLoadBoundary, Resource::kBoundaryIn);
      load.layer = layer;
      load.unit = ordinary;
      boundary = BoundaryIn(layer);
      load.buffer = boundary;
      load.bytes = TokenBytes();
      Read(HostBoundary(layer));
      Write(boundary);
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
      StoreGradients(mixture_unit, mixture_gradient);
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
    StoreGradients(ordinary, ordinary_gradient);
  }

  int64_t GradientBuffer(int64_t unit) {
    const ParameterUnit& description = layout_.units()[unit];
    const WindowSet::Slot slot = gradients_.Take(description.kind, unit);
    return BufferIndex("gradient." + slot.name, Space::kDevice, description.elements * 4);
  }

  void StoreGradients(int64_t unit, int64_t gradient) {
    const bool resident = layout_.resident(unit);
    const Resource resource = !resident                     ? Resource::kDeviceToHost
                              : layout_.rank_count() == 1 ? Resource::kDeviceUpdate
                                                          : Resource::kCollective;
    for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
      const int64_t from = layout_.reduces_on_devices() ? Reduce(unit, c, gradient) : gradient;
      Node& store = Add(NodeKind::kStoreGradient, resource);
      store.unit = unit;
      store.chunk = c;
      store.buffer = from;
      store.bytes = resource == Resource::kDeviceUpdate ? 0 : StoredBytes(c);
      Read(from);
      Landed(c);
    }
    Norms(unit);
  }

  // What a rank stores of a chunk's gradient: its partial, or its slice of the sum.
  int64_t StoredBytes(int64_t c) const {
    const int64_t bytes = layout_.chunks()[c].elements * layout_.gradient_bytes();
    return layout_.reduces_on_devices() ? bytes / layout_.rank_count() : bytes;
  }

  // Sums the ranks' partials, each rank its slice; returns the buffer that holds it.
  int64_t Reduce(int64_t unit, int64_t c, int64_t gradient) {
    const int64_t value_bytes = layout_.reduction() == v1::GRADIENT_REDUCTION_DEVICE_FLOAT32 ? 4 : 2;
    const int64_t slice_bytes = layout_.chunks()[c].elements / layout_.rank_count() * value_bytes;
    const int64_t slot = BufferIndex("gradient.reduced." + std::to_string(reduced_++ % kReducedSlots),
                                     Space::kDevice, slice_bytes);
    Node& reduce = Add(NodeKind::kReduceGradient, Resource::kCollective);
    reduce.unit = unit;
    reduce.chunk = c;
    reduce.buffer = slot;
    reduce.gradient = gradient;
    // From each of the others.
    reduce.bytes = slice_bytes * (layout_.rank_count() - 1);
    Read(gradient);
    Write(slot);
    return slot;
  }

  // The last node completes the gradient of chunk `c` on this rank.
  void Landed(int64_t c) {
    stores_.push_back(last());
    landed_[c] = last();
  }

  // The owner of a resident chunk sums the ranks' partials once the last micro-batch is in.
  void Norms(int64_t unit) {
    if (!layout_.resident(unit) || micro_batch_ + 1 < plan_.accumulation()) return;
    for (int64_t c = layout_.first_chunk(unit); c < layout_.first_chunk(unit + 1); ++c) {
      Node& norm = Add(NodeKind::kNorm, Resource::kDeviceUpdate);
      norm.unit = unit;
      norm.chunk = c;
      norm.owner_rank = layout_.chunks()[c].owner_rank;
      After(landed_.at(c));
      Landed(c);
    }
  }

  // Added to what the head has put into the gradient, which then goes as any other.
  void TiedEmbeddingBackward() {
    const int64_t gradient = GradientBuffer(embedding_);
    Node& node = Add(NodeKind::kEmbeddingBackward, Resource::kCompute);
    node.unit = embedding_;
    node.gradient = gradient;
    Write(gradient);
    StoreGradients(embedding_, gradient);
  }

  void EmbeddingBackward() {
    if (model_.tied_embedding) return TiedEmbeddingBackward();
    const int64_t rows = BufferIndex("gradient.rows", Space::kDevice, 0);
    Node& node = Add(NodeKind::kEmbeddingBackward, Resource::kCompute);
    node.unit = embedding_;
    Write(rows);
    if (micro_batch_ + 1 < plan_.accumulation()) return;
    Node& store = Add(NodeKind::kStoreRows, layout_.resident(embedding_) ? Resource::kDeviceUpdate
                                                                        : Resource::kDeviceToHost);
    store.unit = embedding_;
    Read(rows);
    for (int64_t c = layout_.first_chunk(embedding_); c < layout_.first_chunk(embedding_ + 1); ++c) {
      Landed(c);
    }
    Norms(embedding_);
  }

  // In the order of next use. The executor of a worker runs those of its own resident chunks.
  void Updates() {
    const bool deferred = plan_.update_mode() == v1::UPDATE_MODE_DEFERRED;
    int64_t gate = loss_node_;
    if (deferred) {
      Add(NodeKind::kClip, Resource::kHostOptimizer);
      for (const int64_t store : stores_) After(store);
      gate = last();
    }
    std::map<int64_t, int64_t> new_updates;
    for (const Chunk& chunk : layout_.chunks()) {
      Node& update = Add(NodeKind::kUpdate, chunk.owner_rank < 0 ? Resource::kHostOptimizer
                                                                 : Resource::kDeviceUpdate);
      update.unit = chunk.unit;
      update.chunk = chunk.index;
      update.owner_rank = chunk.owner_rank;
      update.bytes = chunk.elements * layout_.update_traffic_bytes(chunk.unit);
      After(landed_.at(chunk.index));
      After(gate);
      if (UsedInPlace(chunk.unit)) Write(Weights(chunk.unit));
      new_updates[chunk.index] = last();
    }
    WaitForBacklogSlots(new_updates);
    updates_ = std::move(new_updates);
  }

  // A backlog slot is a buffer too: its next writer waits for the update that reads it, in this step or the
  // one before. Executors keep these edges by the word `backlog_freed`.
  void WaitForBacklogSlots(const std::map<int64_t, int64_t>& new_updates) {
    const int64_t slots = layout_.ring_slot_count();
    const int64_t in_step = layout_.ring_chunks_per_step();
    std::map<int64_t, int64_t> chunk_at;  // By position in the step's store order.
    for (const Chunk& chunk : layout_.chunks()) {
      const int64_t position = layout_.ring_sequence(chunk.index, 0);
      if (position >= 0) chunk_at[position] = chunk.index;
    }
    for (const auto& [position, chunk] : chunk_at) {
      const int64_t before = position - slots;
      const auto& updates = before >= 0 ? new_updates : updates_;
      const auto reader = updates.find(chunk_at.at(before >= 0 ? before : before + in_step));
      if (reader == updates.end()) continue;
      assembly_.After(landed_.at(chunk), reader->second);
    }
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
  WindowSet windows_;
  WindowSet gradients_;
  int64_t embedding_ = -1;
  int64_t head_ = -1;
  std::map<int64_t, int64_t> layer_unit_;
  std::map<int64_t, int64_t> experts_unit_;

  GraphAssembly assembly_;
  std::vector<int64_t> stores_;            // Of this step.
  std::map<int64_t, int64_t> landed_;      // Chunk to the node that completes its gradient.
  std::map<int64_t, int64_t> updates_;     // Chunk to its newest update.
  int64_t loss_node_ = -1;
  int64_t reduced_ = 0;                    // Chunks of this step that were reduced so far.
  int micro_batch_ = 0;
};

}  // namespace

StepGraph BuildTrainingGraph(const GraphInputs& inputs) { return GraphBuilder(inputs).Training(); }

StepGraph BuildEvaluationGraph(const GraphInputs& inputs) {
  return GraphBuilder(inputs).Evaluation();
}

}  // namespace oom
