// The operators of a device that has kernels of its own for them; a tensor that nobody serves takes the composite
// implementation. They compute what the composites compute, with the same roundings but for the order of sums, and
// never wait for the device. Registered once, before the first operator runs.

#pragma once

#include "runtime/ops/embedding.h"
#include "runtime/ops/head_loss.h"
#include "runtime/ops/layer.h"

namespace oom {

struct DeviceOperators {
  // Whether activations like `x` are served.
  bool (*serves)(const at::Tensor& x);

  // As the functions of these names in layer.h, head_loss.h and embedding.h.
  decltype(&MixerForward) mixer_forward;
  decltype(&MixerBackward) mixer_backward;
  decltype(&MixtureForward) mixture_forward;
  decltype(&MixtureBackward) mixture_backward;
  decltype(&HeadLoss) head_loss;
  decltype(&EmbeddingBackwardByRow) embedding_backward_by_row;
};

void RegisterDeviceOperators(const DeviceOperators& operators);

// Null: the composites.
const DeviceOperators* OperatorsFor(const at::Tensor& x);

}  // namespace oom
