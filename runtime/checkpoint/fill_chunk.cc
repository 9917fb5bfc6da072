#include "runtime/checkpoint/fill_chunk.h"

#include <algorithm>
#include <vector>

#include "runtime/checkpoint/raw_state.h"

namespace oom {
namespace {

// The values of a unit's elements [first, first + out.size()), padding zero.
Status ReadUnitRange(const StateSource& source, const ParameterUnit& unit, StateArray array,
                     int64_t first, std::span<float> out) {
  std::fill(out.begin(), out.end(), 0.0f);
  const int64_t end = first + static_cast<int64_t>(out.size());
  for (size_t t = 0; t < unit.tensors.size(); ++t) {
    const TensorSpec& tensor = unit.tensors[t];
    const int64_t begin_here = std::max(first, tensor.offset_elements);
    const int64_t end_here = std::min(end, tensor.offset_elements + tensor.elements);
    if (begin_here >= end_here) continue;
    OOM_RETURN_IF_ERROR(source.Read(
        unit.index, static_cast<int64_t>(t), array, begin_here - tensor.offset_elements,
        out.subspan(static_cast<size_t>(begin_here - first),
                    static_cast<size_t>(end_here - begin_here))));
  }
  return Status::Ok();
}

}  // namespace

Status FillChunk(const StateSource& source, const SharedLayout& layout, int64_t chunk_index,
                 int64_t first_element, int64_t elements, std::byte* weights, std::byte* rest) {
  const Chunk& chunk = layout.chunks()[static_cast<size_t>(chunk_index)];
  const ParameterUnit& unit = layout.units()[static_cast<size_t>(chunk.unit)];
  std::vector<float> arrays[3];
  for (const StateArray array : {StateArray::kMaster, StateArray::kMoment1, StateArray::kMoment2}) {
    std::vector<float>& values = arrays[static_cast<size_t>(array)];
    values.resize(static_cast<size_t>(elements));
    OOM_RETURN_IF_ERROR(
        ReadUnitRange(source, unit, array, chunk.first_element + first_element, values));
  }
  FloatToRaw(layout.float32() ? Precision::kFloat32 : Precision::kBfloat16, arrays[0], arrays[1],
             arrays[2], first_element,
             {.weights = weights, .rest = rest, .elements = chunk.elements});
  return Status::Ok();
}

}  // namespace oom
