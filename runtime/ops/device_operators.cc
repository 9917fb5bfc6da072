#include "runtime/ops/device_operators.h"

namespace oom {
namespace {

DeviceOperators registered;
bool is_registered = false;

}  // namespace

void RegisterDeviceOperators(const DeviceOperators& operators) {
  registered = operators;
  is_registered = true;
}

const DeviceOperators* OperatorsFor(const at::Tensor& x) {
  return is_registered && registered.serves(x) ? &registered : nullptr;
}

const DeviceOperators* MixerOperatorsFor(const at::Tensor& x, const LayerDescription& layer) {
  const DeviceOperators* const device = OperatorsFor(x);
  return device != nullptr && device->serves_mixer(layer) ? device : nullptr;
}

const DeviceOperators* MixtureOperatorsFor(const at::Tensor& x, const ModelDescription& model,
                                           const LayerDescription& layer) {
  const DeviceOperators* const device = OperatorsFor(x);
  return device != nullptr && device->serves_mixture(model, layer) ? device : nullptr;
}

}  // namespace oom
