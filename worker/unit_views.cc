#include "worker/unit_views.h"

namespace oom {

at::Tensor MemoryView(const void* memory, at::IntArrayRef shape, at::TensorOptions options) {
  // With the device told, LibTorch does not ask the driver whose address this is.
  return at::for_blob(const_cast<void*>(memory), shape)
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

at::Tensor UnitView(const ParameterUnit& unit, TensorRole role, std::byte* base,
                    at::TensorOptions options) {
  if (!unit.has(role)) return {};
  const TensorSpec& spec = unit.tensor(role);
  const auto element_bytes = static_cast<int64_t>(options.dtype().itemsize());
  return MemoryView(base + spec.offset_elements * element_bytes, spec.shape, options);
}

LayerTensors LayerViews(const ParameterUnit& ordinary, std::byte* ordinary_base,
                        const ParameterUnit& mixture, std::byte* mixture_base,
                        at::TensorOptions options) {
  const auto own = [&](TensorRole role) {
    return UnitView(ordinary, role, ordinary_base, options);
  };
  const bool dense = ordinary.has(TensorRole::kDenseGateUp);
  const auto of_mixture = [&](TensorRole routed, TensorRole in_dense) {
    return dense ? own(in_dense) : UnitView(mixture, routed, mixture_base, options);
  };
  return {.input_norm = own(TensorRole::kInputNorm),
          .query = own(TensorRole::kQuery),
          .key = own(TensorRole::kKey),
          .value = own(TensorRole::kValue),
          .output = own(TensorRole::kOutput),
          .query_norm = own(TensorRole::kQueryNorm),
          .key_norm = own(TensorRole::kKeyNorm),
          .post_norm = own(TensorRole::kPostNorm),
          .router = own(TensorRole::kRouter),
          .gate_up = of_mixture(TensorRole::kExpertsGateUp, TensorRole::kDenseGateUp),
          .down = of_mixture(TensorRole::kExpertsDown, TensorRole::kDenseDown)};
}

HeadTensors HeadViews(const ParameterUnit& head, std::byte* base, at::TensorOptions options) {
  return {.final_norm = UnitView(head, TensorRole::kFinalNorm, base, options),
          .head = UnitView(head, TensorRole::kHead, base, options)};
}

}  // namespace oom
