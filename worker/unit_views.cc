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
  const bool dense = !ordinary.has(TensorRole::kRouter);
  const bool beside_dense = !dense && ordinary.has(TensorRole::kDenseGateUp);
  const auto of_experts = [&](TensorRole role) {
    return UnitView(mixture, role, mixture_base, options);
  };
  return {.input_norm = own(TensorRole::kInputNorm),
          .query = own(TensorRole::kQuery),
          .key = own(TensorRole::kKey),
          .value = own(TensorRole::kValue),
          .output = own(TensorRole::kOutput),
          .query_norm = own(TensorRole::kQueryNorm),
          .key_norm = own(TensorRole::kKeyNorm),
          .delta_net = {.query_key_value = own(TensorRole::kDeltaMixed),
                        .gate = own(TensorRole::kDeltaGate),
                        .beta = own(TensorRole::kDeltaBeta),
                        .decay = own(TensorRole::kDeltaDecay),
                        .convolution = own(TensorRole::kDeltaTaps),
                        .a_log = own(TensorRole::kDeltaALog),
                        .dt_bias = own(TensorRole::kDeltaDtBias),
                        .norm = own(TensorRole::kDeltaNorm),
                        .output = own(TensorRole::kDeltaOutput)},
          .mixer_output_norm = own(TensorRole::kMixerOutputNorm),
          .post_norm = own(TensorRole::kPostNorm),
          .router = own(TensorRole::kRouter),
          .gate_up = dense ? own(TensorRole::kDenseGateUp) : of_experts(TensorRole::kExpertsGateUp),
          .down = dense ? own(TensorRole::kDenseDown) : of_experts(TensorRole::kExpertsDown),
          .shared_gate_up =
              own(beside_dense ? TensorRole::kDenseGateUp : TensorRole::kSharedGateUp),
          .shared_down = own(beside_dense ? TensorRole::kDenseDown : TensorRole::kSharedDown),
          .shared_gate = own(TensorRole::kSharedGate),
          .shared_output_norm = own(TensorRole::kDenseOutputNorm),
          .experts_norm = own(TensorRole::kExpertsNorm),
          .experts_output_norm = own(TensorRole::kExpertsOutputNorm),
          .mixture_output_norm = own(TensorRole::kMixtureOutputNorm),
          .router_scale = own(TensorRole::kRouterScale),
          .expert_scale = own(TensorRole::kExpertScale),
          .layer_scale = own(TensorRole::kLayerScale)};
}

HeadTensors HeadViews(const ParameterUnit& head, std::byte* base, at::TensorOptions options) {
  return {.final_norm = UnitView(head, TensorRole::kFinalNorm, base, options),
          .head = UnitView(head, TensorRole::kHead, base, options)};
}

}  // namespace oom
