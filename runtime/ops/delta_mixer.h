// The mixer of a Gated DeltaNet layer, one segment of its tokens at a time:
//   h = x + GatedDeltaNet(RMSNorm(x)),   dx = dh + norm backward of the core's dn.
// Segments run in order forward and in reverse order backward, and hand on what a document that crosses their border
// carries. A part (paper, Table 1) is a segment of whole chunks: its results are rows of the whole, bit for bit.
// Shapes as in gated_delta_net.h and layer.h. Thread-safe: no state but the arguments.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/layer.h"
#include "runtime/ops/segment.h"

namespace oom {

struct DeltaMixerOutput {
  at::Tensor h_TH;           // Of the segment's tokens.
  GatedDeltaNetState state;  // Of the last document, one row: what the next segment may continue.
};

// `x_TH` has the rows of the whole batch; `state` is the last segment's, undefined before the first. `saved` may be
// null.
DeltaMixerOutput DeltaMixerForward(const ModelDescription& model, const LayerDescription& layer,
                                   const LayerTensors& weights, const at::Tensor& x_TH,
                                   const SequenceSegment& segment, const GatedDeltaNetState& state,
                                   DeltaMixerSaved* saved);

struct DeltaMixerGradients {
  at::Tensor x_TH;           // Of the segment's tokens, in dh's type.
  GatedDeltaNetState state;  // Of the first document, one row: for the segment before.
};

// `dh_TH` has the rows of the whole batch; `dstate` is what the segment after gave, undefined behind the last.
DeltaMixerGradients DeltaMixerBackward(const ModelDescription& model, const LayerDescription& layer,
                                       const LayerTensors& weights, const at::Tensor& dh_TH,
                                       const GatedDeltaNetState& dstate,
                                       const DeltaMixerSaved& saved, LayerTensors* gradients);

}  // namespace oom
