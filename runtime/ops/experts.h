// Routed experts on rows sorted by expert: one product per expert on contiguous rows.
//   gate_up = x Wgu_e.T;  y = GLU(gate_up) Wd_e.T;  combined_t = sum over its rows of w * y.
// Backward, with dy the gradient of combined and a = GLU(gate_up), the gated activation (swiglu.h):
//   da = dy Wd_e;  dw = <da, a>  (equal to <dy, y>, without the experts' outputs);
//   dWd_e += dy.T (w a);  dgate_up = GLU backward of w da;
//   dWgu_e += dgate_up.T x;  dx = dgate_up Wgu_e.
// An expert without rows is not touched, its gradient included.
// Shapes: T tokens, K experts a token, R = T * K rows, H hidden, I width, F = 2I, E experts.
// Nothing here knows where rows come from: the caller gathers them, from its own tokens or from
// other ranks.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

// A stable sort of the (token, choice) pairs by expert.
struct ExpertGroups {
  std::vector<int64_t> rows_by_expert;  // [E]; their sum is R.
  at::Tensor pair_R;                    // int64: token * K + choice of each row.
  at::Tensor token_R;                   // int64: token of each row.
  at::Tensor rows_TK;                   // int64: a token's rows, rising, so in expert order.
  // A device's operators keep the numbers on the device: then these are int32, rows_by_expert is empty, and
  // expert e has the rows [first_row_E1[e], first_row_E1[e + 1]).
  at::Tensor first_row_E1;

  int64_t bytes() const;
};

ExpertGroups GroupByExpert(const at::Tensor& expert_TK, int64_t expert_count);

at::Tensor ExpertsGateUpForward(const at::Tensor& x_RH, const at::Tensor& gate_up_EFH,
                                const std::vector<int64_t>& rows_by_expert);

// The experts' weighted outputs, each token's added up in expert order, in their own type.
at::Tensor ExpertsDownForward(const at::Tensor& gate_up_RF, const at::Tensor& down_EHI,
                              const at::Tensor& weight_R, const ExpertGroups& groups,
                              Activation activation);

struct ExpertsGradients {
  at::Tensor x_RH;      // In x's type.
  at::Tensor weight_R;  // Wide.
};

struct ExpertsBackwardInput {
  at::Tensor x_RH;
  at::Tensor gate_up_RF;
  at::Tensor weight_R;  // As applied in the combine.
  at::Tensor dy_RH;     // Gradient of the combined result at each row's token, not weighted.
};

// `dgate_up_EFH` and `ddown_EHI` accumulate.
ExpertsGradients ExpertsBackward(const ExpertsBackwardInput& input, const at::Tensor& gate_up_EFH,
                                 const at::Tensor& down_EHI,
                                 const std::vector<int64_t>& rows_by_expert, Activation activation,
                                 at::Tensor dgate_up_EFH, at::Tensor ddown_EHI);

// [T, K]: what each row has, at its (token, choice) pair.
at::Tensor ByPair(const at::Tensor& value_R, const ExpertGroups& groups);

// [T, H]: each token's rows added one by one in expert order, in `type`.
at::Tensor SumTokenRows(const at::Tensor& x_RH, const ExpertGroups& groups, at::ScalarType type);

}  // namespace oom
