// The operators of a device that has kernels of its own for them; a tensor that nobody serves takes
// the composite implementation, and so does every tensor where a model's description asks for what
// the kernels lack. They compute what the composites compute, with the same roundings but for the
// order of sums, and never wait for the device. Where a kernel keeps FP32 or FP16 what its
// composite rounds to BF16 (within Gated DeltaNet; the shared expert's gate; the gradient of the
// scale of a router's input), its errors are no larger. Registered once, before the first operator
// runs.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/delta_mixer.h"
#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "runtime/ops/layer.h"

namespace oom {

struct DeviceOperators {
  // Whether activations like `x` are served.
  bool (*serves)(const at::Tensor& x);
  // And of such activations a layer's mixer, its mixture. Forward and backward agree.
  bool (*serves_mixer)(const LayerDescription& layer);
  bool (*serves_mixture)(const ModelDescription& model, const LayerDescription& layer);

  // As the functions of these names in layer.h, delta_mixer.h, head_loss.h and embedding.h.
  decltype(&MixerForward) mixer_forward;
  decltype(&MixerBackward) mixer_backward;
  // Asked for models with branch norms alone.
  decltype(&FinishMixer) finish_mixer;
  decltype(&BeginMixerBackward) begin_mixer_backward;
  decltype(&DeltaMixerForward) delta_mixer_forward;
  decltype(&DeltaMixerBackward) delta_mixer_backward;
  decltype(&MixtureForward) mixture_forward;
  decltype(&MixtureBackward) mixture_backward;
  decltype(&HeadLoss) head_loss;
  decltype(&EmbeddingBackwardByRow) embedding_backward_by_row;
};

void RegisterDeviceOperators(const DeviceOperators& operators);

// Null: the composites.
const DeviceOperators* OperatorsFor(const at::Tensor& x);
const DeviceOperators* MixerOperatorsFor(const at::Tensor& x, const LayerDescription& layer);
const DeviceOperators* MixtureOperatorsFor(const at::Tensor& x, const ModelDescription& model,
                                           const LayerDescription& layer);

}  // namespace oom
