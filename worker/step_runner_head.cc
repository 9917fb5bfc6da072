// The nodes of a step above and below the layers: the head with the loss, and what the embedding's gradient is made of.
// A tied embedding is both: the head's node starts its gradient, the embedding's completes it.

#include <utility>

#include "runtime/base/check.h"
#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "worker/step_runner.h"
#include "worker/unit_views.h"

namespace oom {
namespace {

// With 0: everything in one chunk.
int64_t HeadChunkTokens(const v1::Plan& plan, int64_t tokens) {
  const int64_t chunk = plan.partitions().head_chunk_tokens();
  return chunk > 0 ? chunk : tokens;
}

}  // namespace

Result<HeadTensors> StepRunner::HeadWeights(const Node& node, int64_t step) {
  OOM_ASSIGN_OR_RETURN(std::byte* const base, UnitBase(node.unit, node.weights, step));
  HeadTensors weights = HeadViews(options_.layout->units()[node.unit], base, weight_options_);
  if (!options_.model->tied_embedding) return weights;
  const ParameterUnit& embedding = options_.layout->units().front();
  OOM_ASSIGN_OR_RETURN(std::byte* const tied,
                       UnitBase(embedding.index, node.mixture_weights, step));
  weights.head = UnitView(embedding, TensorRole::kEmbedding, tied, weight_options_);
  return weights;
}

HeadTensors StepRunner::ClearedHeadGradients(const Node& node) {
  const ParameterUnit& unit = options_.layout->units()[node.unit];
  ClearGradient(unit, node.gradient);
  HeadTensors gradients =
      HeadViews(unit, options_.arena->At(*graph_, node.gradient), gradient_options_);
  if (!options_.model->tied_embedding) return gradients;
  const ParameterUnit& embedding = options_.layout->units().front();
  ClearGradient(embedding, node.mixture_gradient);
  gradients.head = UnitView(embedding, TensorRole::kEmbedding,
                            options_.arena->At(*graph_, node.mixture_gradient), gradient_options_);
  return gradients;
}

Status StepRunner::Head(const Node& node, int64_t step) {
  OOM_ASSIGN_OR_RETURN(const HeadTensors weights, HeadWeights(node, step));
  HeadTensors gradients = ClearedHeadGradients(node);
  const at::Tensor x = std::move(activation_.back());
  // The others need it as soon as there is something; this rank needs theirs after the head alone.
  if (router_stats_.tokens > 0 && options_.plan->rank_count() > 1) {
    OOM_RETURN_IF_ERROR(options_.data_plane->PublishRouterCounts(
        step, router_stats_.count_E.const_data_ptr<int64_t>(), router_stats_.tokens));
  }
  const int64_t valid = batch().valid_targets;
  const HeadLossResult result =
      HeadLoss(*options_.model, weights, x, batch().targets,
               {.gradient_scale = valid > 0 ? 1.0 / static_cast<double>(valid) : 0.0,
                .chunk_tokens = HeadChunkTokens(*options_.plan, x.size(0))},
               &gradients);
  upstream_ = result.dx_TH;
  loss_sum_ = node.micro_batch == 0 ? result.loss_sum : loss_sum_.add_(result.loss_sum);
  OOM_RETURN_IF_ERROR(Balance(step));
  if (!last_micro_batch(node)) return Status::Ok();
  return options_.data_plane->PublishLoss(
      step, {.loss_sum = loss_sum_.const_data_ptr<double>(),
             .valid_targets = valid,
             .auxiliary_loss =
                 auxiliary_loss_.defined() ? auxiliary_loss_.const_data_ptr<double>() : nullptr});
}

Status StepRunner::Balance(int64_t step) {
  if (router_stats_.tokens == 0) return Status::Ok();
  RouterStats of_all = router_stats_;
  if (options_.plan->rank_count() > 1) {
    of_all.count_E = at::empty_like(router_stats_.count_E);
    OOM_ASSIGN_OR_RETURN(of_all.tokens, options_.data_plane->SumRouterCounts(
                                            step, of_all.count_E.mutable_data_ptr<int64_t>()));
  }
  balance_ = MakeLoadBalanceTerm(of_all, options_.auxiliary_loss);
  // Linear in the probabilities, which are this rank's: its share.
  auxiliary_loss_ = LoadBalanceLoss(of_all).mul_(options_.auxiliary_loss);
  return Status::Ok();
}

Status StepRunner::EvaluationHead(const Node& node, int64_t step) {
  OOM_ASSIGN_OR_RETURN(const HeadTensors weights, HeadWeights(node, step));
  const at::Tensor x = std::move(activation_.back());
  const HeadLossResult result =
      HeadLoss(*options_.model, weights, x, batch().targets,
               {.chunk_tokens = HeadChunkTokens(*options_.plan, x.size(0))}, nullptr);
  if (evaluation_loss_sum_.defined()) {
    evaluation_loss_sum_.add_(result.loss_sum);
    evaluation_targets_.add_(result.valid_targets);
  } else {
    evaluation_loss_sum_ = result.loss_sum;
    evaluation_targets_ = result.valid_targets;
  }
  return Status::Ok();
}

Status StepRunner::TiedEmbeddingBackward(const Node& node) {
  oom::EmbeddingBackward(at::mul(upstream_.to(at::kFloat), embedding_scale_), batch().tokens,
                         UnitView(options_.layout->units()[node.unit], TensorRole::kEmbedding,
                                  options_.arena->At(*graph_, node.gradient), gradient_options_));
  upstream_.reset();
  return Status::Ok();
}

Status StepRunner::EmbeddingBackward(const Node& node) {
  if (options_.model->tied_embedding) return TiedEmbeddingBackward(node);
  if (node.micro_batch == 0) {
    embedding_upstream_.clear();
    embedding_tokens_.clear();
  }
  embedding_upstream_.push_back(std::move(upstream_));
  const bool single = options_.plan->accumulation() == 1;
  // A device's place for tokens is a later micro-batch's too.
  embedding_tokens_.push_back(single ? batch().tokens : batch().tokens.clone());
  if (!last_micro_batch(node)) return Status::Ok();
  const RowGradient rows = EmbeddingBackwardByRow(
      single ? embedding_upstream_.front() : at::cat(embedding_upstream_),
      single ? embedding_tokens_.front() : at::cat(embedding_tokens_));
  row_sums_ = rows.sum_UH.to(at::kFloat).contiguous();
  if (embedding_scale_ != 1.0) row_sums_.mul_(embedding_scale_);
  embedding_upstream_.clear();
  embedding_tokens_.clear();
  return Status::Ok();
}

Status StepRunner::StoreRows(const Node& node, int64_t step) {
  const int64_t elements =
      row_set_size_[static_cast<size_t>(step % 2)] * options_.model->hidden_size;
  OOM_CHECK(elements <= row_sums_.numel());
  options_.device->KeepUntilRead(row_sums_);
  return options_.data_plane->StoreRows(node, step, row_sums_.const_data_ptr<float>(), elements);
}

}  // namespace oom
