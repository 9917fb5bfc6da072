// The mixture of a layer where a dense MLP and routed experts stand side by side, each between
// norms of its own, and the router reads the layer's input itself (Gemma 4; the model
// reference, 5.2, 5.3):
//   d = norm[dense output](MLP(norm[post](h)));
//   u = RMSNorm(h) * scale * H^(-1/2) (the norm has no weight);
//   z = u Wr.T;  wn = the K largest of softmax(z), renormalised;  w_e = wn_e * expert scale_e;
//   e = norm[experts output](sum over the chosen of w_e FFN_e(norm[experts](h)));
//   y = layer scale * (h + norm[mixture output](d + e)).
// Backward, with v = layer scale * dy:
//   dt = norm backward of v at d + e;  d(MLP), d(sum) = norm backwards of dt;
//   dwn_e = dw_e * expert scale_e, dexpert scale_e += sum over tokens of dw_e wn_e;
//   du: router.h;  dscale += sum over tokens of du * RMSNorm(h) * H^(-1/2);
//   dh = v + norm backwards of the MLP's, the experts' and the router's input gradients.
// The layer scale is not trained: no gradient is written.
// Shapes as in layer.h, T counting the tokens of the part. Kept is what a replay gives: both
// gate/up products and the routing; the branches' outputs are recomputed. Called by mixture.cc
// alone.

#pragma once

#include "runtime/ops/layer.h"

namespace oom {

// H^(-1/2), by which the router's normed input is scaled.
double RouterInputScale(const at::Tensor& h_TH);

// Everything that backward needs.
MixtureSaved ParallelMixtureGateUp(const ModelDescription& model, const LayerTensors& weights,
                                   const at::Tensor& h_TH, TokenRange tokens);

// y.
at::Tensor ParallelMixtureDown(const ModelDescription& model, const LayerTensors& weights,
                               const MixtureSaved& saved);

// dh, of the tokens of `saved`; `dy_TH` has their rows alone.
at::Tensor ParallelMixtureBackward(const ModelDescription& model, const LayerTensors& weights,
                                   const at::Tensor& dy_TH, const MixtureSaved& saved,
                                   LayerTensors* gradients, const LoadBalanceTerm& balance);

}  // namespace oom
