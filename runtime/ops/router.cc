#include "runtime/ops/router.h"

#include <tuple>

#include "runtime/ops/precision.h"

namespace oom {
namespace {

at::Tensor Probabilities(const RouterSaved& saved) {
  return at::softmax(saved.logits_TE, 1, WideType(saved.logits_TE.scalar_type()));
}

}  // namespace

int64_t RouterSaved::bytes() const {
  return TensorBytes(logits_TE) + TensorBytes(expert_TK) + TensorBytes(weight_TK);
}

RouterSaved RouterForward(const ModelDescription& model, const at::Tensor& normed_TH,
                          const at::Tensor& router_EH) {
  RouterSaved saved;
  saved.logits_TE = at::linear(normed_TH, router_EH);
  std::tie(saved.weight_TK, saved.expert_TK) =
      at::topk(Probabilities(saved), model.experts_per_token, /*dim=*/1);
  if (model.renormalize_top_k) {
    saved.weight_TK.div_(saved.weight_TK.sum(1, /*keepdim=*/true));
  }
  return saved;
}

at::Tensor CombineWeights(const ModelDescription& model, const RouterSaved& saved) {
  if (model.family == Family::kMixtral) return saved.weight_TK;
  return saved.weight_TK.to(saved.logits_TE.scalar_type());
}

at::Tensor RouterBackward(const ModelDescription& model, const RouterSaved& saved,
                          const at::Tensor& dweight_TK, const LoadBalanceTerm& balance,
                          const at::Tensor& normed_TH, const at::Tensor& router_EH,
                          at::Tensor drouter_EH) {
  at::Tensor dlogits_TE = at::zeros(saved.logits_TE.sizes(), saved.weight_TK.options());
  if (model.renormalize_top_k) {
    const at::Tensor mean = at::mul(saved.weight_TK, dweight_TK).sum(1, /*keepdim=*/true);
    dlogits_TE.scatter_(1, saved.expert_TK, at::sub(dweight_TK, mean).mul_(saved.weight_TK));
  } else {
    const at::Tensor probability_TE = Probabilities(saved);
    const at::Tensor mean = at::mul(saved.weight_TK, dweight_TK).sum(1, /*keepdim=*/true);
    dlogits_TE.scatter_(1, saved.expert_TK, dweight_TK).sub_(mean).mul_(probability_TE);
  }
  if (balance.coefficient != 0.0) {
    AddLoadBalanceGradient(balance, Probabilities(saved), dlogits_TE);
  }
  AccumulateWeightGradient(drouter_EH, dlogits_TE, normed_TH);
  return at::mm(dlogits_TE, Wide(router_EH));
}

void CountRouting(const RouterSaved& saved, RouterStats* stats) {
  const int64_t experts = saved.logits_TE.size(1);
  if (!stats->count_E.defined()) {
    stats->count_E = at::zeros({experts}, saved.expert_TK.options());
    stats->probability_E = at::zeros({experts}, saved.weight_TK.options());
  }
  stats->count_E.add_(at::bincount(saved.expert_TK.flatten(), {}, experts));
  stats->probability_E.add_(Probabilities(saved).sum(0));
  stats->tokens += saved.logits_TE.size(0);
}

}  // namespace oom
