// Router on the device, after the product of tokens and router matrix:
//   p = softmax(z);  Sel = the K largest, falling; of equal logits z the lower expert;
//   w_k = p_k / sum over Sel of p, or p_k alone if the model does not renormalise.
// LibTorch's topk leaves the order of equal p open, so the choice may differ from the composite's
// there, the weights do not. A NaN makes a token's weights NaN; its experts are distinct still.
// Backward (the choice itself has no gradient), f from the load-balancing loss:
//   renormalised:      dz_e = w_e * (dw_e - sum over Sel of w dw) in Sel, else 0;
//   not renormalised:  dp_e = dw_e in Sel, else 0;  dz = p * (dp - sum over Sel of w dw);
//   balance:           dz += scale * p * (f - <f, p>).
// Shapes: T tokens, E <= 512 experts, K <= 16 and K <= E. Logits are of the activations' type;
// everything computed is FP32, dlogits are stored in FP32 or rounded once.
// No argument may alias another. Sums have an order that depends on T and E alone.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace oom {

struct RouterShape {
  int64_t token_count = 0;
  int expert_count = 0;
  int experts_per_token = 0;
  bool renormalize = true;
  // The combine's weights are rounded to the activations' type: Qwen3; not Mixtral.
  bool round_weights = true;
};

struct RouterChoice {
  int32_t* expert_TK = nullptr;
  float* weight_TK = nullptr;   // w, as backward needs it.
  float* applied_TK = nullptr;  // w as the combine applies it. Null: not written.
  // Sums of p over each block's tokens, [RouterBlocks(shape), E]. Null: not written.
  double* probability_BE = nullptr;
};

// Rows of probability_BE.
int64_t RouterBlocks(const RouterShape& shape);

void RouterForward(const RouterShape& shape, const __nv_bfloat16* logits_TE,
                   const RouterChoice& choice, cudaStream_t stream);
void RouterForward(const RouterShape& shape, const float* logits_TE, const RouterChoice& choice,
                   cudaStream_t stream);

// count_E += rows of each expert, probability_E += the blocks' sums in order. `first_row_E1` as
// GroupRowsByExpert leaves it.
void AddRouterStats(const RouterShape& shape, const double* probability_BE,
                    const int32_t* first_row_E1, int64_t* count_E, double* probability_E,
                    cudaStream_t stream);

// f = count / tokens, `token_count` summed over everything that was counted.
void LoadBalanceFraction(const int64_t* count_E, int64_t expert_count, int64_t token_count,
                         float* fraction_E, cudaStream_t stream);

struct RouterBalance {
  const float* fraction_E = nullptr;  // Null: no such loss.
  double scale = 0.0;                 // coefficient * E / N.
};

// `expert_TK` and `weight_TK` from the forward pass. Logits are read where the model does not
// renormalise or there is a balance term.
struct RouterBackwardInput {
  const int32_t* expert_TK = nullptr;
  const float* weight_TK = nullptr;
  const float* dweight_TK = nullptr;
  RouterBalance balance;
};

void RouterBackward(const RouterShape& shape, const __nv_bfloat16* logits_TE,
                    const RouterBackwardInput& input, float* dlogits_TE, cudaStream_t stream);
void RouterBackward(const RouterShape& shape, const __nv_bfloat16* logits_TE,
                    const RouterBackwardInput& input, __nv_bfloat16* dlogits_TE,
                    cudaStream_t stream);
void RouterBackward(const RouterShape& shape, const float* logits_TE,
                    const RouterBackwardInput& input, float* dlogits_TE, cudaStream_t stream);

}  // namespace oom
