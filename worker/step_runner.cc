#include "worker/step_runner.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/embedding.h"
#include "worker/unit_views.h"

namespace oom {
namespace {

// LibTorch goes on with advice for Python programs.
std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

// The one place where LibTorch's exceptions become Status. Nothing above catches.
template <class Step>
Status Guard(Step&& step) {
  try {
    return step();
  } catch (const c10::OutOfMemoryError& error) {
    return Status(Code::kResourceExhausted,
                  "an operator needs more device memory than the plan leaves it; raise "
                  "budgets.gpu_memory, or lower sequence_length or global_batch: " +
                      FirstLine(error.what_without_backtrace()))
        .WithReason("OUT_OF_GPU_MEMORY");
  } catch (const c10::AcceleratorError& error) {
    return Status(Code::kInternal, FirstLine(error.what_without_backtrace()) + " (CUDA error " +
                                       std::to_string(error.get_error_code()) +
                                       "); look for the GPU's XID (sudo dmesg | grep -i xid)")
        .WithReason("GPU_FAULT");
  } catch (const c10::Error& error) {
    return Status(Code::kInternal, error.what_without_backtrace()).WithReason("INTERNAL");
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, "out of memory").WithReason("OUT_OF_HOST_MEMORY");
  }
}

}  // namespace

StepRunner::StepRunner(const Options& options)
    : options_(options),
      weight_options_(at::TensorOptions()
                          .dtype(options.layout->float32() ? at::kFloat : at::kBFloat16)
                          .device(options.device->torch_device())),
      gradient_options_(weight_options_.dtype(at::kFloat)),
      program_(options.model, options.plan->partitions()),
      embedding_scale_(EmbeddingScale(*options.model, weight_type())) {
  OOM_CHECK(options_.auxiliary_loss == 0.0 || options_.plan->accumulation() == 1);
  const auto layers = static_cast<size_t>(options_.model->layer_count());
  layer_unit_.assign(layers, -1);
  mixture_unit_.assign(layers, -1);
  for (const ParameterUnit& unit : options_.layout->units()) {
    if (unit.kind == UnitKind::kLayer) layer_unit_[static_cast<size_t>(unit.layer)] = unit.index;
    if (unit.kind == UnitKind::kExperts) mixture_unit_[static_cast<size_t>(unit.layer)] = unit.index;
  }
  for (size_t layer = 0; layer < layers; ++layer) {
    if (mixture_unit_[layer] < 0) mixture_unit_[layer] = layer_unit_[layer];
  }
  activation_.resize(layers + 1);
  activation_to_store_.resize(layers + 1);
  device_boundary_.resize(layers + 1);
  boundary_in_.resize(layers);
  saved_.resize(layers);
}

void StepRunner::BeginTraining(const StepGraph* graph) {
  graph_ = graph;
  evaluating_ = false;
}

void StepRunner::BeginEvaluation(const StepGraph* graph, std::vector<Batch> batches) {
  graph_ = graph;
  evaluating_ = true;
  evaluation_batches_ = std::move(batches);
  evaluation_next_ = 0;
  evaluation_loss_sum_.reset();
  evaluation_targets_.reset();
}

double StepRunner::evaluation_loss_sum() const {
  return evaluation_loss_sum_.defined() ? evaluation_loss_sum_.item<double>() : 0.0;
}

int64_t StepRunner::evaluation_targets() const {
  return evaluation_targets_.defined() ? evaluation_targets_.item<int64_t>() : 0;
}

Status StepRunner::Run(const Node& node, int64_t step) {
  DataPlane& plane = *options_.data_plane;
  switch (node.kind) {
    case NodeKind::kLoadUnit:
      return plane.LoadUnit(node, step, options_.arena->At(*graph_, node.buffer));
    case NodeKind::kGatherUnit:
      return plane.GatherUnit(node, options_.arena->At(*graph_, node.buffer));
    case NodeKind::kReduceGradient:
      return plane.ReduceGradient(
          node, reinterpret_cast<const float*>(options_.arena->At(*graph_, node.gradient)),
          options_.arena->At(*graph_, node.buffer));
    case NodeKind::kStoreGradient:
      return plane.StoreGradient(node, step, options_.arena->At(*graph_, node.buffer));
    case NodeKind::kLoadBoundary:
      return plane.LoadBoundary(node, BoundaryPlace(node));
    case NodeKind::kNorm:
      return plane.Norm(node, step);
    case NodeKind::kUpdate:
      return plane.Update(node, step);
    default:
      return Guard([&] { return RunOperators(node, step); });
  }
}

Status StepRunner::RunOperators(const Node& node, int64_t step) {
  if (node.resource != Resource::kCompute) return RunCompute(node, step);
  const bool traced = options_.trace != nullptr && options_.trace->Wants(step);
  if (traced) static_cast<void>(options_.device->TakeMemoryUse());  // What was before is no peak of this node.
  OOM_RETURN_IF_ERROR(RunCompute(node, step));
  for (const int64_t layer : node.takes) {
    boundary_in_[static_cast<size_t>(layer)] =
        at::empty({batch().tokens.size(0), options_.model->hidden_size}, weight_options_);
  }
  if (traced) options_.trace->AddMemoryUse(options_.device->TakeMemoryUse());
  return Status::Ok();
}

Status StepRunner::RunCompute(const Node& node, int64_t step) {
  switch (node.kind) {
    case NodeKind::kGatherRows: return GatherRows(node, step);
    case NodeKind::kStoreBoundary: return StoreBoundary(node);
    case NodeKind::kForwardMixer: return ForwardMixer(node, step);
    case NodeKind::kForwardMixture: return ForwardMixture(node, step);
    case NodeKind::kHead: return Head(node, step);
    case NodeKind::kEvaluationHead: return EvaluationHead(node, step);
    case NodeKind::kReplayMixer: return ReplayMixer(node, step);
    case NodeKind::kReplayMixture: return ReplayMixture(node, step);
    case NodeKind::kBackwardMixture: return BackwardMixture(node, step);
    case NodeKind::kBackwardMixer: return BackwardMixer(node, step);
    case NodeKind::kEmbeddingBackward: return EmbeddingBackward(node);
    case NodeKind::kStoreRows: return StoreRows(node, step);
    default: break;
  }
  OOM_CHECK_MSG(false, "a node that does not run on a worker");
  return Status::Ok();
}

const ParameterUnit& StepRunner::OrdinaryUnit(int64_t layer) const {
  return options_.layout->units()[layer_unit_[static_cast<size_t>(layer)]];
}

const ParameterUnit& StepRunner::MixtureUnit(int64_t layer) const {
  return options_.layout->units()[mixture_unit_[static_cast<size_t>(layer)]];
}

bool StepRunner::KeepsBoundary(int64_t layer, v1::BoundaryHome home) const {
  const v1::LayerPlan& plan = options_.plan->layers(static_cast<int>(layer));
  return !evaluating_ && plan.boundary() == home && !plan.retain_mixer();
}

Result<std::byte*> StepRunner::UnitBase(int64_t unit, int64_t buffer, int64_t step) {
  std::byte* window = options_.arena->At(*graph_, buffer);
  if (window != nullptr) return window;
  return options_.data_plane->WeightsInPlace(unit, step);
}

Result<LayerTensors> StepRunner::Weights(const Node& node, int64_t step) {
  const ParameterUnit& ordinary = OrdinaryUnit(node.layer);
  const ParameterUnit& mixture = MixtureUnit(node.layer);
  OOM_ASSIGN_OR_RETURN(std::byte* const base, UnitBase(ordinary.index, node.weights, step));
  std::byte* mixture_base = base;
  if (node.mixture_weights >= 0 && mixture.index != ordinary.index) {
    OOM_ASSIGN_OR_RETURN(mixture_base, UnitBase(mixture.index, node.mixture_weights, step));
  }
  return LayerViews(ordinary, base, mixture, mixture_base, weight_options_);
}

LayerTensors StepRunner::Gradients(const Node& node) {
  std::byte* base = options_.arena->At(*graph_, node.gradient);
  std::byte* mixture_base =
      node.mixture_gradient < 0 ? base : options_.arena->At(*graph_, node.mixture_gradient);
  return LayerViews(OrdinaryUnit(node.layer), base, MixtureUnit(node.layer), mixture_base,
                    gradient_options_);
}

std::byte* StepRunner::BoundaryPlace(const Node& node) const {
  std::byte* const planned = options_.arena->At(*graph_, node.buffer);
  if (planned != nullptr) return planned;
  return static_cast<std::byte*>(boundary_in_[static_cast<size_t>(node.layer)].mutable_data_ptr());
}

at::Tensor StepRunner::View(int64_t buffer, at::IntArrayRef shape, at::ScalarType type) const {
  return MemoryView(options_.arena->At(*graph_, buffer), shape, weight_options_.dtype(type));
}

void StepRunner::ClearGradient(const ParameterUnit& unit, int64_t buffer) {
  View(buffer, {unit.elements}, at::kFloat).zero_();
}

Status StepRunner::GatherRows(const Node& node, int64_t step) {
  Batch read;
  if (evaluating_) {
    OOM_CHECK(evaluation_next_ < evaluation_batches_.size());
    read = std::move(evaluation_batches_[evaluation_next_++]);
  } else {
    read = options_.train->Read(step, node.micro_batch);
    OOM_RETURN_IF_ERROR(AddToRowSet(node, step, read.tokens));
  }
  const at::Tensor tokens = read.tokens;  // The host's.
  const size_t slot = batches_read_++ % batches_.size();
  batches_[slot] = options_.device->Upload(std::move(read), slot, options_.plan->micro_batch_tokens());
  const int64_t width = options_.model->hidden_size;
  OOM_RETURN_IF_ERROR(options_.data_plane->GatherRows(
      node, step, width,
      {tokens.const_data_ptr<int32_t>(), static_cast<size_t>(tokens.numel())},
      batches_[slot].tokens.const_data_ptr<int32_t>(), options_.arena->At(*graph_, node.buffer)));
  activation_[0] = View(node.buffer, {tokens.numel(), width}, weight_type());
  if (embedding_scale_ != 1.0) activation_[0].mul_(embedding_scale_);
  if (KeepsBoundary(0, v1::BOUNDARY_HOME_HOST)) activation_to_store_[0] = activation_[0];
  return Status::Ok();
}

// Before the forward: rows that no rank's batch holds are updated as soon as the losses are known.
Status StepRunner::AddToRowSet(const Node& node, int64_t step, const at::Tensor& tokens) {
  if (node.micro_batch == 0) row_set_.clear();
  const auto* values = tokens.const_data_ptr<int32_t>();
  row_set_.insert(row_set_.end(), values, values + tokens.numel());
  if (!last_micro_batch(node)) return Status::Ok();
  std::sort(row_set_.begin(), row_set_.end());
  row_set_.erase(std::unique(row_set_.begin(), row_set_.end()), row_set_.end());
  row_set_size_[static_cast<size_t>(step % 2)] = static_cast<int64_t>(row_set_.size());
  return options_.data_plane->PublishRowSet(step, row_set_);
}

Status StepRunner::StoreBoundary(const Node& node) {
  const at::Tensor x = std::move(activation_to_store_[static_cast<size_t>(node.layer)]);
  options_.device->KeepUntilRead(x);
  return options_.data_plane->StoreBoundary(node, static_cast<const std::byte*>(x.const_data_ptr()));
}

Status StepRunner::ForwardMixer(const Node& node, int64_t step) {
  const auto layer = static_cast<size_t>(node.layer);
  if (layer == 0) ++batch_in_use_;
  OOM_ASSIGN_OR_RETURN(const LayerTensors weights, Weights(node, step));
  at::Tensor x = std::move(activation_[layer]);
  // The gathered rows' place is the next batch's as soon as this node is done; backward may want the input.
  if (layer == 0) x = x.clone();
  if (KeepsBoundary(node.layer, v1::BOUNDARY_HOME_DEVICE)) device_boundary_[layer] = x;
  const v1::LayerPlan& plan = options_.plan->layers(static_cast<int>(node.layer));
  const bool retain = !evaluating_ && plan.retain_mixer();
  mixer_output_ = program_.ForwardMixer(node.layer, weights, x, batch().packed,
                                        retain ? &saved_[layer].mixer : nullptr);
  if (retain && !plan.retain_mixture()) saved_[layer].mixer_output = mixer_output_;
  return Status::Ok();
}

Status StepRunner::ForwardMixture(const Node& node, int64_t step) {
  const auto layer = static_cast<size_t>(node.layer);
  OOM_ASSIGN_OR_RETURN(const LayerTensors weights, Weights(node, step));
  const bool retain =
      !evaluating_ && options_.plan->layers(static_cast<int>(node.layer)).retain_mixture();
  if (layer == 0) router_stats_ = {};
  const bool balance = !evaluating_ && options_.auxiliary_loss != 0.0;
  at::Tensor y =
      program_.ForwardMixture(node.layer, weights, mixer_output_,
                              retain ? &saved_[layer].mixture : nullptr, /*replay=*/false,
                              balance ? &router_stats_ : nullptr);
  mixer_output_.reset();
  const bool below_a_layer = node.layer + 1 < options_.model->layer_count();
  if (below_a_layer && KeepsBoundary(node.layer + 1, v1::BOUNDARY_HOME_HOST)) {
    activation_to_store_[layer + 1] = y;
  }
  activation_[layer + 1] = std::move(y);
  return Status::Ok();
}

Status StepRunner::ReplayMixer(const Node& node, int64_t step) {
  const auto layer = static_cast<size_t>(node.layer);
  OOM_ASSIGN_OR_RETURN(const LayerTensors weights, Weights(node, step));
  at::Tensor x = std::move(device_boundary_[layer]);
  if (boundary_in_[layer].defined()) {
    x = std::move(boundary_in_[layer]);
  } else if (node.buffer >= 0) {
    x = View(node.buffer, {batch().tokens.size(0), options_.model->hidden_size}, weight_type());
  }
  mixer_output_ = program_.ForwardMixer(node.layer, weights, x, batch().packed, &saved_[layer].mixer);
  return Status::Ok();
}

Status StepRunner::ReplayMixture(const Node& node, int64_t step) {
  const auto layer = static_cast<size_t>(node.layer);
  OOM_ASSIGN_OR_RETURN(const LayerTensors weights, Weights(node, step));
  if (saved_[layer].mixer_output.defined()) mixer_output_ = std::move(saved_[layer].mixer_output);
  static_cast<void>(program_.ForwardMixture(node.layer, weights, mixer_output_,
                                            &saved_[layer].mixture, /*replay=*/true, nullptr));
  mixer_output_.reset();
  return Status::Ok();
}

Status StepRunner::BackwardMixture(const Node& node, int64_t step) {
  const auto layer = static_cast<size_t>(node.layer);
  OOM_ASSIGN_OR_RETURN(const LayerTensors weights, Weights(node, step));
  ClearGradient(OrdinaryUnit(node.layer), node.gradient);
  LayerTensors gradients = Gradients(node);
  gradients.experts_unwritten = node.mixture_gradient != node.gradient;
  upstream_ = program_.BackwardMixture(node.layer, weights, upstream_, saved_[layer].mixture,
                                       balance_, &gradients);
  saved_[layer].mixture.clear();
  mixer_output_.reset();
  return Status::Ok();
}

Status StepRunner::BackwardMixer(const Node& node, int64_t step) {
  const auto layer = static_cast<size_t>(node.layer);
  OOM_ASSIGN_OR_RETURN(const LayerTensors weights, Weights(node, step));
  LayerTensors gradients = Gradients(node);
  upstream_ = program_.BackwardMixer(node.layer, weights, upstream_, saved_[layer].mixer, batch().packed,
                                     &gradients);
  saved_[layer] = {};
  return Status::Ok();
}

}  // namespace oom
