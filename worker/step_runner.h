// StepRunner does the work of every node of the training and evaluation graphs on the worker's device: compute
// nodes through the operators of runtime/ops, all others through the data plane. Values travel between nodes
// in slots that the graph's edges protect; nothing here locks.
// Run is called by the executor's stream threads. SetMode only while nothing is in flight.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime/graph/executor.h"
#include "runtime/graph/step_graph.h"
#include "runtime/ops/head_loss.h"
#include "worker/batch_reader.h"
#include "worker/buffer_arena.h"
#include "worker/data_plane.h"
#include "worker/layer_program.h"
#include "worker/node_trace.h"
#include "worker/worker_device.h"

namespace oom {

class StepRunner : public NodeRunner {
 public:
  struct Options {
    // All must outlive the object.
    const ModelDescription* model = nullptr;
    const SharedLayout* layout = nullptr;
    const BufferArena* arena = nullptr;
    WorkerDevice* device = nullptr;
    DataPlane* data_plane = nullptr;
    const BatchReader* train = nullptr;
    const v1::Plan* plan = nullptr;
    NodeTrace* trace = nullptr;     // Null: memory is not traced.
    int rank = 0;
    double auxiliary_loss = 0.0;    // Coefficient. REQUIRES: 0 with accumulation over 1.
  };
  explicit StepRunner(const Options& options);

  // The graph whose nodes come next. In evaluation each issued step takes the next of `batches`.
  void BeginTraining(const StepGraph* graph);
  void BeginEvaluation(const StepGraph* graph, std::vector<Batch> batches);

  Status Run(const Node& node, int64_t step) override;

  // Of the evaluation since BeginEvaluation; valid when nothing is in flight.
  double evaluation_loss_sum() const;
  int64_t evaluation_targets() const;

 private:
  Status RunOperators(const Node& node, int64_t step);
  Status RunCompute(const Node& node, int64_t step);
  Status GatherRows(const Node& node, int64_t step);
  Status AddToRowSet(const Node& node, int64_t step, const at::Tensor& tokens);
  Status ForwardMixer(const Node& node, int64_t step);
  Status ForwardMixture(const Node& node, int64_t step);
  Status Head(const Node& node, int64_t step);
  // Load-balancing loss: balance_ and auxiliary_loss_, once all ranks have published their routing.
  Status Balance(int64_t step);
  Status EvaluationHead(const Node& node, int64_t step);
  Status ReplayMixer(const Node& node, int64_t step);
  Status ReplayMixture(const Node& node, int64_t step);
  Status BackwardMixture(const Node& node, int64_t step);
  Status BackwardMixer(const Node& node, int64_t step);
  Status EmbeddingBackward(const Node& node);
  Status TiedEmbeddingBackward(const Node& node);
  // The head's, with a tied embedding's where the model has one.
  Result<HeadTensors> HeadWeights(const Node& node, int64_t step);
  HeadTensors ClearedHeadGradients(const Node& node);
  Status StoreRows(const Node& node, int64_t step);
  Status StoreBoundary(const Node& node);

  // Weights of the node's layer, waited for where they are used in place.
  Result<LayerTensors> Weights(const Node& node, int64_t step);
  Result<std::byte*> UnitBase(int64_t unit, int64_t buffer, int64_t step);
  LayerTensors Gradients(const Node& node);
  // Of the unit whose gradient buffer this is.
  void ClearGradient(const ParameterUnit& unit, int64_t buffer);
  // Where the input of the node's layer comes back to.
  std::byte* BoundaryPlace(const Node& node) const;
  at::Tensor View(int64_t buffer, at::IntArrayRef shape, at::ScalarType type) const;
  const ParameterUnit& OrdinaryUnit(int64_t layer) const;
  const ParameterUnit& MixtureUnit(int64_t layer) const;
  const Batch& batch() const { return batches_[(batch_in_use_ - 1) % batches_.size()]; }
  bool last_micro_batch(const Node& node) const {
    return node.micro_batch + 1 == options_.plan->accumulation();
  }
  at::ScalarType weight_type() const { return weight_options_.dtype().toScalarType(); }
  bool KeepsBoundary(int64_t layer, v1::BoundaryHome home) const;

  const Options options_;
  const at::TensorOptions weight_options_;
  const at::TensorOptions gradient_options_;
  const LayerProgram program_;
  const double embedding_scale_;
  std::vector<int64_t> layer_unit_;
  std::vector<int64_t> mixture_unit_;
  const StepGraph* graph_ = nullptr;
  bool evaluating_ = false;

  // Written by the gather nodes, read by compute; a gather runs at most two batches ahead.
  std::array<Batch, 4> batches_;
  uint64_t batches_read_ = 0;        // Of the H2D stream.
  std::vector<int32_t> row_set_;     // Of the step's micro-batches so far; the H2D stream's.
  // Distinct tokens of steps by parity: a step's rows are stored before the next one's gather ends.
  std::array<int64_t, 2> row_set_size_ = {};
  uint64_t batch_in_use_ = 0;        // Of the compute stream: batches begun.
  std::vector<Batch> evaluation_batches_;
  size_t evaluation_next_ = 0;

  // Input of layer l on its way: once for compute, once for the boundary's store.
  std::vector<at::Tensor> activation_;
  std::vector<at::Tensor> activation_to_store_;
  std::vector<at::Tensor> device_boundary_;
  // Places of inputs on their way back, where the operators' memory has them: taken by compute, filled by the
  // boundary's load, given up by replay.
  std::vector<at::Tensor> boundary_in_;
  // Of the compute stream.
  at::Tensor mixer_output_;
  at::Tensor upstream_;              // Gradient on its way down.
  std::vector<LayerSaved> saved_;
  RouterStats router_stats_;         // Of this rank.
  LoadBalanceTerm balance_;          // Of the step, over all ranks.
  at::Tensor loss_sum_;              // FP64 scalar.
  at::Tensor auxiliary_loss_;        // FP64 scalar, this rank's share; undefined without such a loss.
  std::vector<at::Tensor> embedding_upstream_;
  std::vector<at::Tensor> embedding_tokens_;
  at::Tensor row_sums_;              // FP32, by rising token; perhaps with room for more rows.
  at::Tensor evaluation_loss_sum_;   // FP64 scalar; undefined before the first batch.
  at::Tensor evaluation_targets_;    // int64 scalar.
};

}  // namespace oom
