// What the implementations of the Gated DeltaNet mixer share: the core's shape, and what a document
// carries across a segment's borders (one row, as delta_mixer.h hands it on) among the rows of all
// the segment's documents. Documents that carry nothing have zeros. Thread-safe: pure functions.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/gated_delta_net.h"
#include "runtime/ops/segment.h"

namespace oom {

GatedDeltaNetShape DeltaNetShapeOf(const ModelDescription& model, const DeltaNetDescription& delta);

// For the segment's documents, of what the segment before gave; undefined where no document began
// there.
GatedDeltaNetState StatesBefore(const SequenceSegment& segment, const GatedDeltaNetState& carried);
// For the segment after; undefined where no document goes on there.
GatedDeltaNetState StateAfter(const SequenceSegment& segment, const GatedDeltaNetState& states);

// Their gradients, in the reverse direction.
GatedDeltaNetState StateGradientsAfter(const SequenceSegment& segment,
                                       const GatedDeltaNetState& carried);
GatedDeltaNetState StateGradientBefore(const SequenceSegment& segment,
                                       const GatedDeltaNetState& gradients);

}  // namespace oom
