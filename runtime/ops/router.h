// Router:
//   z = n Wr.T;  p = softmax(z);  Sel = the K largest;
//   w_e = p_e / sum over Sel of p, or p_e alone if the model does not renormalise.
// Backward (the choice itself has no gradient):
//   renormalised:      dz_e = w_e * (dw_e - sum over Sel of w dw) in Sel, else 0;
//   not renormalised:  dp_e = dw_e in Sel, else 0;  dz = p * (dp - <p, dp>).
// Shapes: T tokens, H hidden, E experts, K experts a token; n [T, H], Wr [E, H].
// Softmax and weights are wide. Ties go as LibTorch's topk gives them.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"
#include "runtime/ops/load_balance.h"

namespace oom {

struct RouterSaved {
  at::Tensor logits_TE;  // In the activations' type.
  at::Tensor expert_TK;  // int64, by falling probability.
  at::Tensor weight_TK;  // Wide.

  int64_t bytes() const;
};

RouterSaved RouterForward(const ModelDescription& model, const at::Tensor& normed_TH,
                          const at::Tensor& router_EH);

// The weights as the combine applies them: Qwen3 rounds them to the activations' type, Mixtral does
// not.
at::Tensor CombineWeights(const ModelDescription& model, const RouterSaved& saved);

// dn [T, H], wide. `drouter_EH` accumulates.
at::Tensor RouterBackward(const ModelDescription& model, const RouterSaved& saved,
                          const at::Tensor& dweight_TK, const LoadBalanceTerm& balance,
                          const at::Tensor& normed_TH, const at::Tensor& router_EH,
                          at::Tensor drouter_EH);

// Adds this router's choices to `stats`.
void CountRouting(const RouterSaved& saved, RouterStats* stats);

}  // namespace oom
