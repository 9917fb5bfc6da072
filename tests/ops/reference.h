// The layer and the head written plainly, straight from the model reference, with one dense mask
// and every expert on every token: slow, differentiable, and sharing no code with the operators.

#pragma once

#include "tests/ops/ops_testing.h"

namespace oom::testing {

at::Tensor ReferenceNorm(const at::Tensor& x, const at::Tensor& weight, double epsilon);

// q, o [T, N, d]; k, v [T, G, d]. `score_scale`: 0: d^(-1/2).
at::Tensor ReferenceAttention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const std::vector<int64_t>& cu_seqlens,
                              int64_t window, double score_scale = 0.0);

at::Tensor ReferenceMixer(const ModelDescription& model, const LayerDescription& layer,
                          const LayerTensors& weights, const at::Tensor& x_TH,
                          const PackedBatch& batch);

// `probability_TE`, if not null, receives the router's softmax.
at::Tensor ReferenceMixture(const ModelDescription& model, const LayerDescription& layer,
                            const LayerTensors& weights, const at::Tensor& h_TH,
                            at::Tensor* probability_TE = nullptr);

// E * sum_e f_e P_e of one layer, f a constant.
at::Tensor ReferenceLoadBalance(const ModelDescription& model, const at::Tensor& probability_TE);

}  // namespace oom::testing
