#include "runtime/ops/load_balance.h"

#include "runtime/base/check.h"

namespace oom {

at::Tensor LoadBalanceLoss(const RouterStats& stats) {
  OOM_CHECK(stats.tokens > 0);
  const double tokens = static_cast<double>(stats.tokens);
  const at::Tensor product =
      at::mul(stats.count_E.to(at::kDouble), stats.probability_E.to(at::kDouble));
  return product.sum().mul_(static_cast<double>(stats.count_E.size(0))).div_(tokens * tokens);
}

LoadBalanceTerm MakeLoadBalanceTerm(const RouterStats& stats, double coefficient) {
  if (coefficient == 0.0) return {};
  OOM_CHECK(stats.tokens > 0);
  return {.coefficient = coefficient,
          .fraction_E = stats.count_E.to(stats.probability_E.scalar_type())
                            .div_(static_cast<double>(stats.tokens)),
          .tokens = stats.tokens};
}

void AddLoadBalanceGradient(const LoadBalanceTerm& term, const at::Tensor& probability_TE,
                            at::Tensor dlogits_TE) {
  const double scale = term.coefficient * static_cast<double>(term.fraction_E.size(0)) /
                       static_cast<double>(term.tokens);
  const at::Tensor mean_T1 = at::matmul(probability_TE, term.fraction_E).unsqueeze(1);
  dlogits_TE.addcmul_(probability_TE, at::sub(term.fraction_E, mean_T1), scale);
}

}  // namespace oom
