#include "runtime/ops/delta_gates.h"

#include "runtime/ops/precision.h"

namespace oom {
namespace {

constexpr double kSoftplusBeta = 1.0;
constexpr double kSoftplusThreshold = 20.0;

at::Tensor TimeStep(const DeltaGateInput& input) {
  return at::add(Wide(input.a_TN), Wide(input.dt_bias_N));
}

}  // namespace

DeltaGates DeltaGatesForward(const DeltaGateInput& input) {
  const at::Tensor rate_N = Wide(input.a_log_N).exp().neg_();
  return {.beta_TN = Wide(at::sigmoid(input.b_TN)),
          .log_decay_TN =
              at::softplus(TimeStep(input), kSoftplusBeta, kSoftplusThreshold).mul_(rate_N)};
}

DeltaGateGradients DeltaGatesBackward(const DeltaGates& dgates, const DeltaGateInput& input,
                                      at::Tensor da_log_N, at::Tensor ddt_bias_N) {
  const DeltaGates gates = DeltaGatesForward(input);
  const at::Tensor rate_N = Wide(input.a_log_N).exp().neg_();
  const at::Tensor da_TN = at::softplus_backward(
      at::mul(dgates.log_decay_TN, rate_N), TimeStep(input), kSoftplusBeta, kSoftplusThreshold);
  ddt_bias_N.add_(da_TN.sum(0));
  da_log_N.add_(at::mul(dgates.log_decay_TN, gates.log_decay_TN).sum(0));
  return {.b_TN = at::sigmoid_backward(dgates.beta_TN, gates.beta_TN).to(input.b_TN.scalar_type()),
          .a_TN = da_TN.to(input.a_TN.scalar_type())};
}

}  // namespace oom
