#include "runtime/ops/experts.h"

#include <tuple>

#include "runtime/base/check.h"
#include "runtime/ops/precision.h"
#include "runtime/ops/swiglu.h"

namespace oom {
namespace {

// Calls visit(expert, first_row, rows) for each expert that has rows, in order.
template <class Visit>
void ForEachExpert(const std::vector<int64_t>& rows_by_expert, const Visit& visit) {
  int64_t first_row = 0;
  for (size_t expert = 0; expert < rows_by_expert.size(); ++expert) {
    const int64_t rows = rows_by_expert[expert];
    if (rows > 0) visit(static_cast<int64_t>(expert), first_row, rows);
    first_row += rows;
  }
}

// For fewer rows the CPU's library takes kernels that add up in another order, so that an expert's result for a token
// would depend on how many other tokens of the chunk it serves.
constexpr int64_t kFewestRows = 64;

// y = x @ w, a row's bits the same whatever the others are.
void RowsProduct(at::Tensor y, const at::Tensor& x, const at::Tensor& w) {
  const int64_t rows = x.size(0);
  if (rows >= kFewestRows || !x.is_cpu()) {
    at::mm_out(y, x, w);
    return;
  }
  at::Tensor padded = at::zeros({kFewestRows, x.size(1)}, x.options());
  padded.narrow(0, 0, rows).copy_(x);
  y.copy_(at::mm(padded, w).narrow(0, 0, rows));
}

// y = x @ w[e] for each expert's rows; w [E, in, out], perhaps a transposed view.
at::Tensor GroupedProduct(const at::Tensor& x, const at::Tensor& w,
                          const std::vector<int64_t>& rows_by_expert) {
  at::Tensor y = at::empty({x.size(0), w.size(2)}, x.options());
  ForEachExpert(rows_by_expert, [&](int64_t expert, int64_t first_row, int64_t rows) {
    RowsProduct(y.narrow(0, first_row, rows), x.narrow(0, first_row, rows), w.select(0, expert));
  });
  return y;
}

// gradient[e] += dy.T @ x over each expert's rows.
void GroupedWeightGradient(const at::Tensor& gradient, const at::Tensor& dy, const at::Tensor& x,
                           const std::vector<int64_t>& rows_by_expert) {
  ForEachExpert(rows_by_expert, [&](int64_t expert, int64_t first_row, int64_t rows) {
    AccumulateWeightGradient(gradient.select(0, expert), dy.narrow(0, first_row, rows),
                             x.narrow(0, first_row, rows));
  });
}

}  // namespace

int64_t ExpertGroups::bytes() const {
  return TensorBytes(pair_R) + TensorBytes(token_R) + TensorBytes(rows_TK) +
         TensorBytes(first_row_E1);
}

ExpertGroups GroupByExpert(const at::Tensor& expert_TK, int64_t expert_count) {
  const at::Tensor expert = expert_TK.flatten();
  const at::Tensor count_E = at::bincount(expert, {}, expert_count).to(at::kCPU);
  OOM_CHECK(count_E.size(0) == expert_count);

  ExpertGroups groups;
  const int64_t* counts = count_E.const_data_ptr<int64_t>();
  groups.rows_by_expert.assign(counts, counts + expert_count);
  groups.pair_R = std::get<1>(at::sort(expert, /*stable=*/true, /*dim=*/0, /*descending=*/false));
  groups.token_R = at::floor_divide(groups.pair_R, expert_TK.size(1));
  const at::Tensor row_of_pair =
      at::empty_like(groups.pair_R)
          .scatter_(0, groups.pair_R, at::arange(expert.size(0), expert.options()));
  groups.rows_TK = std::get<0>(row_of_pair.view(expert_TK.sizes()).sort(1));
  return groups;
}

at::Tensor ExpertsGateUpForward(const at::Tensor& x_RH, const at::Tensor& gate_up_EFH,
                                const std::vector<int64_t>& rows_by_expert) {
  return GroupedProduct(x_RH, gate_up_EFH.transpose(1, 2), rows_by_expert);
}

at::Tensor ExpertsDownForward(const at::Tensor& gate_up_RF, const at::Tensor& down_EHI,
                              const at::Tensor& weight_R, const ExpertGroups& groups,
                              Activation activation) {
  at::Tensor y_RH = GroupedProduct(SwigluForward(gate_up_RF, activation), down_EHI.transpose(1, 2),
                                   groups.rows_by_expert);
  y_RH.mul_(weight_R.unsqueeze(1));
  return SumTokenRows(y_RH, groups, y_RH.scalar_type());
}

ExpertsGradients ExpertsBackward(const ExpertsBackwardInput& input, const at::Tensor& gate_up_EFH,
                                 const at::Tensor& down_EHI,
                                 const std::vector<int64_t>& rows_by_expert, Activation activation,
                                 at::Tensor dgate_up_EFH, at::Tensor ddown_EHI) {
  const at::Tensor weight_R1 = Wide(input.weight_R).unsqueeze(1);
  at::Tensor activated_RI = Wide(SwigluForward(input.gate_up_RF, activation));
  at::Tensor dactivated_RI = GroupedProduct(input.dy_RH, down_EHI, rows_by_expert);
  ExpertsGradients result;
  result.weight_R = at::mul(activated_RI, dactivated_RI).sum(1);

  GroupedWeightGradient(ddown_EHI, input.dy_RH, activated_RI.mul_(weight_R1), rows_by_expert);
  activated_RI.reset();
  const at::Tensor dgate_up_RF =
      SwigluBackward(dactivated_RI.mul_(weight_R1), input.gate_up_RF, activation);
  GroupedWeightGradient(dgate_up_EFH, dgate_up_RF, input.x_RH, rows_by_expert);
  result.x_RH = GroupedProduct(dgate_up_RF, gate_up_EFH, rows_by_expert);
  return result;
}

at::Tensor ByPair(const at::Tensor& value_R, const ExpertGroups& groups) {
  return at::empty_like(value_R).scatter_(0, groups.pair_R, value_R).view(groups.rows_TK.sizes());
}

at::Tensor SumTokenRows(const at::Tensor& x_RH, const ExpertGroups& groups, at::ScalarType type) {
  at::Tensor sum_TH = x_RH.index_select(0, groups.rows_TK.select(1, 0)).to(type);
  for (int64_t k = 1; k < groups.rows_TK.size(1); ++k) {
    sum_TH.add_(x_RH.index_select(0, groups.rows_TK.select(1, k)));
  }
  return sum_TH;
}

}  // namespace oom
