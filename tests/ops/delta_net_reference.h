// Gated DeltaNet written plainly, token by token, straight from the model reference: slow,
// differentiable, and sharing no code with the operators. Shapes as in the operators' headers.

#pragma once

#include <vector>

#include "runtime/ops/gated_delta_net.h"
#include "runtime/ops/gated_delta_rule.h"
#include "tests/ops/ops_testing.h"

namespace oom::testing {

// One document: silu of the convolution, [L, C]; `context_PC` are the rows before it.
at::Tensor ReferenceConvolution(const at::Tensor& x_LC, const at::Tensor& weight_CJ,
                                const at::Tensor& context_PC);

// Every document of the segment. `input.state_DNKV` must be defined.
GatedDeltaRuleOutput ReferenceDeltaRule(const GatedDeltaRuleInput& input,
                                        const std::vector<int64_t>& cu_seqlens);

// Every document of the segment. `state` must be defined.
GatedDeltaNetOutput ReferenceDeltaNet(const GatedDeltaNetShape& shape,
                                      const GatedDeltaNetTensors& weights, const at::Tensor& x_TH,
                                      const GatedDeltaNetState& state,
                                      const std::vector<int64_t>& cu_seqlens);

// Every field of GatedDeltaNetTensors with its name.
const std::vector<std::pair<std::string, at::Tensor GatedDeltaNetTensors::*>>& DeltaNetFields();

GatedDeltaNetTensors RandomDeltaNet(const GatedDeltaNetShape& shape, int64_t hidden, int64_t taps,
                                    uint64_t seed, at::ScalarType type = at::kDouble);

// Random states of `documents` documents.
GatedDeltaNetState RandomDeltaNetState(const GatedDeltaNetShape& shape, int64_t documents,
                                       int64_t taps, uint64_t seed,
                                       at::ScalarType type = at::kDouble);

// Wide zeros in the shapes of `weights`.
GatedDeltaNetTensors ZeroGradients(const GatedDeltaNetTensors& weights);

}  // namespace oom::testing
