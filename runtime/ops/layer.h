// The two programs of a decoder layer, forward and backward, as the executor calls them: the mixer
// (norm, attention, residual) and the mixture (norm, routed experts or a dense MLP, residual).
//   h = x + Attention(RMSNorm(x)),   y = h + Mixture(RMSNorm(h)).
// With branch norms what a branch gives is normed before it is added, and y is scaled (the model
// reference, 5.2; the mixture in parallel_mixture.h).
// Shapes: T tokens, H hidden, N query heads, G key/value heads, d head size, E experts, K experts a
// token, I expert width, R = T * K expert rows, F = 2I.
// Activations are all of one type (FP32, BF16 or FP64). Parameter gradients accumulate (+=) and are
// wide (FP32; FP64 with FP64 activations). No autograd: the caller runs these with gradient mode
// off. Thread-safe: no state but the arguments.
//
// Parts (paper, Table 1): the mixer by query heads, the mixture by tokens. A part reads and
// accumulates only the rows or columns of the weights that it needs. Replaying a forward gives the
// saved tensors bit for bit, so that backward does not depend on whether they were kept.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"
#include "runtime/ops/causal_attention.h"
#include "runtime/ops/experts.h"
#include "runtime/ops/gated_delta_net.h"
#include "runtime/ops/load_balance.h"
#include "runtime/ops/router.h"
#include "runtime/ops/segment.h"
#include "runtime/ops/shared_expert.h"

namespace oom {

// Documents packed one after another. They never cross a sequence.
struct PackedBatch {
  at::Tensor positions;             // [T] int64: 0, 1, ... within each document.
  std::vector<int64_t> cu_seqlens;  // Document i is tokens [cu_seqlens[i], cu_seqlens[i + 1]).
  at::Tensor document_starts;       // int32: cu_seqlens where the tensors are.
  int64_t longest = 0;              // Tokens of the longest document.
};

// Positions that restart with each document. REQUIRES: cu_seqlens starts at 0 and does not
// decrease.
PackedBatch MakePackedBatch(std::vector<int64_t> cu_seqlens);

// Tokens [first, first + tokens). REQUIRES: both ends are where documents start or end.
PackedBatch PartOfBatch(const PackedBatch& batch, int64_t first, int64_t tokens);

// A layer's weights, or their gradients in the same shapes. What the model lacks is undefined; an
// undefined gradient is not computed where its weight only scales (norms), else it must be there.
struct LayerTensors {
  at::Tensor input_norm;  // [H]
  at::Tensor query;       // [N*d, H]; with an output gate [N*2d, H], by head [query | gate]
  at::Tensor key;         // [G*d, H]
  at::Tensor value;       // [G*d, H]
  at::Tensor output;      // [H, N*d]
  at::Tensor query_norm;  // [d]
  at::Tensor key_norm;    // [d]
  GatedDeltaNetTensors delta_net;  // In place of attention's.
  at::Tensor mixer_output_norm;    // [H], of what the mixer gives
  at::Tensor post_norm;   // [H]
  at::Tensor router;      // [E, H]; undefined in a dense layer.
  at::Tensor gate_up;     // [E, 2I, H]; dense: [2I, H]
  at::Tensor down;        // [E, H, I]; dense: [H, I]
  // Of the MLP that all tokens have beside routed experts, Is or the dense width wide.
  at::Tensor shared_gate_up;  // [2Is, H]
  at::Tensor shared_down;     // [H, Is]
  at::Tensor shared_gate;     // [1, H]
  // Norms of the two branches where experts and a dense MLP are side by side.
  at::Tensor shared_output_norm;   // [H]
  at::Tensor experts_norm;         // [H]
  at::Tensor experts_output_norm;  // [H]
  at::Tensor mixture_output_norm;  // [H], of what the mixture gives
  at::Tensor router_scale;         // [H], of the router's normed input
  at::Tensor expert_scale;         // [E], of the combine weights
  at::Tensor layer_scale;          // [1]; no gradient

  // Of gradients: nothing is in those of routed experts yet. The first part's backward writes them
  // in place of adding, all of them, and clears this: the largest gradients need no pass of zeros.
  bool experts_unwritten = false;
};

// Query heads [first, first + count): whole groups of query heads that share a key/value head.
struct HeadRange {
  int64_t first = 0;
  int64_t count = -1;  // -1: all.
};

// Tokens [first, first + count).
struct TokenRange {
  int64_t first = 0;
  int64_t count = -1;  // -1: all.
};

// What the mixer's backward needs: its input and the projections of its heads before norm and
// rotation (both are recomputed), the attention results, the log-sum-exp of the scores, and with
// branch norms what the norm takes (of a part undefined: the parts' sum has one norm).
struct MixerSaved {
  HeadRange heads;
  at::Tensor input_TH;
  at::Tensor query_TNr;  // r = d, or 2d with an output gate: by head [query | gate].
  at::Tensor key_TGd;
  at::Tensor value_TGd;
  AttentionOutput attention;
  at::Tensor output_TH;

  // Of everything that this keeps alive, the input included.
  int64_t bytes() const;
};

// The same of a Gated DeltaNet layer's segment (delta_mixer.h); the core's input is recomputed.
struct DeltaMixerSaved {
  SequenceSegment segment;
  at::Tensor input_TH;  // The segment's rows.
  GatedDeltaNetSaved core;

  int64_t bytes() const;
};

// What the mixture's backward needs: its input, the routing, and the gate/up product. Neither the
// normed rows nor the experts' and MLPs' outputs are kept.
struct MixtureSaved {
  TokenRange tokens;
  at::Tensor input_TH;    // The range's rows.
  at::Tensor gate_up_RF;  // In expert order; dense: [T, 2I].
  RouterSaved router;     // Routed layers only.
  ExpertGroups groups;    // Routed layers only.
  SharedExpertSaved shared;  // Where all tokens have an expert, or a dense MLP, beside.

  int64_t bytes() const;
};

// Writes zeros to the experts' gradients that nothing was written to yet.
void ClearUnwrittenExperts(LayerTensors* gradients);

// All heads: h in x's type. A part: its contribution to the output projection, wide and without the
// residual; FinishMixer(sum of the parts) is h. `saved` may be null: nothing is kept.
at::Tensor MixerForward(const ModelDescription& model, const LayerDescription& layer,
                        const LayerTensors& weights, const at::Tensor& x_TH,
                        const PackedBatch& batch, MixerSaved* saved, HeadRange heads = {});

// All heads: dx in dh's type, of the gradient of h. A part: its contribution to dx, wide and
// without the residual, of the gradient that BeginMixerBackward(dh) gives; AddResidual(dh, sum of
// the parts) is dx. The heads are those of `saved`.
at::Tensor MixerBackward(const ModelDescription& model, const LayerDescription& layer,
                         const LayerTensors& weights, const at::Tensor& dh_TH,
                         const MixerSaved& saved, const PackedBatch& batch,
                         LayerTensors* gradients);

// h of all heads' output projection (a sum of parts, or rounded already): x + sum; with branch
// norms x + RMSNorm(sum), and `output_TH`, if not null, receives what BeginMixerBackward needs.
at::Tensor FinishMixer(const ModelDescription& model, const LayerTensors& weights,
                       const at::Tensor& x_TH, const at::Tensor& sum_TH, at::Tensor* output_TH);

// The gradient of all heads' output projection, in dh's type: dh, or the norm's backward of it.
at::Tensor BeginMixerBackward(const ModelDescription& model, const LayerTensors& weights,
                              const at::Tensor& dh_TH, const at::Tensor& output_TH,
                              LayerTensors* gradients);

// residual + sum of parts, rounded once to the residual's type.
at::Tensor AddResidual(const at::Tensor& residual_TH, const at::Tensor& sum_TH);

// The range's rows: a view.
at::Tensor RowsOf(const at::Tensor& x_TH, TokenRange tokens);

struct MixtureOptions {
  // Replay: stop once `saved` is complete, before the down product; the result is undefined.
  bool stop_at_gate_up = false;
  TokenRange tokens;
  // Routed layers add what they chose, if not null.
  RouterStats* stats = nullptr;
};

// y of the tokens asked for. `saved` may be null: nothing is kept.
at::Tensor MixtureForward(const ModelDescription& model, const LayerDescription& layer,
                          const LayerTensors& weights, const at::Tensor& h_TH, MixtureSaved* saved,
                          const MixtureOptions& options = {});

// dh of the tokens of `saved`; `dy_TH` has the rows of the whole batch. `balance` adds the gradient
// of the load-balancing loss (its coefficient may be 0).
at::Tensor MixtureBackward(const ModelDescription& model, const LayerDescription& layer,
                           const LayerTensors& weights, const at::Tensor& dy_TH,
                           const MixtureSaved& saved, LayerTensors* gradients,
                           const LoadBalanceTerm& balance = {});

}  // namespace oom
