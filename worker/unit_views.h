// Tensors over the memory of a parameter unit (a window, a resident unit, a gradient buffer): views, no
// copies. The memory must outlive them. `options`: element type and device.

#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/model/unit.h"
#include "runtime/ops/head_loss.h"
#include "runtime/ops/layer.h"

namespace oom {

// The tensor with `role` in the unit that starts at `base`; undefined if the unit has none.
at::Tensor UnitView(const ParameterUnit& unit, TensorRole role, std::byte* base,
                    at::TensorOptions options);
// A tensor over memory of the options' device.
at::Tensor MemoryView(const void* memory, at::IntArrayRef shape, at::TensorOptions options);

// `mixture` is the experts unit, or the ordinary unit itself for a dense layer.
LayerTensors LayerViews(const ParameterUnit& ordinary, std::byte* ordinary_base,
                        const ParameterUnit& mixture, std::byte* mixture_base,
                        at::TensorOptions options);

HeadTensors HeadViews(const ParameterUnit& head, std::byte* base, at::TensorOptions options);

}  // namespace oom
