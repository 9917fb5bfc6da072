#include <algorithm>

#include "runtime/base/check.h"
#include "runtime/kernels/gated_delta_rule.h"
#include "runtime/kernels/gated_delta_rule_stages.h"

namespace oom {

using internal::DeltaScratch;
using internal::DeltaStage;

namespace internal {

DeltaScratch::DeltaScratch(const GatedDeltaRuleShape& shape, bool backward, void* memory) {
  const auto take = [&](auto** array, int64_t elements) {
    constexpr int64_t kAlignment = 256;
    using Element = std::remove_pointer_t<std::remove_pointer_t<decltype(array)>>;
    if (memory != nullptr) {
      *array = reinterpret_cast<Element*>(static_cast<char*>(memory) + bytes_);
    }
    bytes_ += (elements * static_cast<int64_t>(sizeof(Element)) + kAlignment - 1) / kAlignment *
              kAlignment;
  };
  const int64_t tiles = shape.chunks * shape.value_heads;
  take(&gates, tiles * kGateRows * kDeltaChunk);
  take(&write, tiles * kSquareElements);
  take(&scores, tiles * kSquareElements);
  if (!backward) return;
  take(&inverse, tiles * kSquareElements);
  take(&states, tiles * kStateElements);
  take(&missing, tiles * kTokenElements);
  take(&written, tiles * kTokenElements);
  take(&magnitude, shape.key_heads);
  take(&doutput, shape.tokens * shape.value_heads * kDeltaHeadSize);
  take(&dstates, tiles * kStateElements);
  take(&dwritten, tiles * kTokenElements);
  take(&dread, tiles * kTokenElements);
  take(&dsum, tiles * kDeltaChunk);
}

int64_t DeltaScratch::Bytes(const GatedDeltaRuleShape& shape, bool backward) {
  return DeltaScratch(shape, backward, nullptr).bytes_;
}

}  // namespace internal

namespace {

void CheckShape(const GatedDeltaRuleShape& shape, const void* scratch) {
  OOM_CHECK(shape.tokens > 0 && shape.documents > 0 && shape.chunks > 0 && shape.key_heads > 0);
  OOM_CHECK(shape.value_heads > 0 && shape.value_heads % shape.key_heads == 0);
  OOM_CHECK(scratch != nullptr && reinterpret_cast<uintptr_t>(scratch) % 16 == 0);
  // What a launch's grid can count.
  OOM_CHECK(std::max(shape.chunks, 8 * shape.documents) * shape.value_heads < int64_t{1} << 31);
}

}  // namespace

int64_t GatedDeltaRuleForwardScratchBytes(const GatedDeltaRuleShape& shape) {
  return DeltaScratch::Bytes(shape, /*backward=*/false);
}

void GatedDeltaRuleForward(const GatedDeltaRuleShape& shape, const GatedDeltaRuleKernelInput& input,
                           const GatedDeltaRuleKernelOutput& output, void* scratch,
                           cudaStream_t stream) {
  CheckShape(shape, scratch);
  const DeltaStage stage{shape, input, DeltaScratch(shape, /*backward=*/false, scratch)};
  PrepareDeltaChunks(stage, stream);
  ScanDeltaChunks(stage, output, stream);
}

int64_t GatedDeltaRuleBackwardScratchBytes(const GatedDeltaRuleShape& shape) {
  return DeltaScratch::Bytes(shape, /*backward=*/true);
}

void GatedDeltaRuleBackward(const GatedDeltaRuleShape& shape,
                            const GatedDeltaRuleKernelInput& input,
                            const GatedDeltaRuleOutputGradient& doutput,
                            const GatedDeltaRuleKernelGradients& gradients, void* scratch,
                            cudaStream_t stream) {
  CheckShape(shape, scratch);
  const DeltaStage stage{shape, input, DeltaScratch(shape, /*backward=*/true, scratch)};
  PrepareDeltaChunks(stage, stream);
  ScanDeltaChunksForBackward(stage, stream);
  ScaleDeltaGradients(stage, doutput, stream);
  SweepDeltaChunks(stage, doutput, gradients, stream);
  DeltaChunkGradients(stage, gradients, stream);
  DeltaKeyGradients(stage, gradients, stream);
}

}  // namespace oom
