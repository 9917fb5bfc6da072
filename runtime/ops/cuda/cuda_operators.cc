#include "runtime/ops/cuda/cuda_operators.h"

#include "runtime/ops/cuda/delta_mixer_cuda.h"
#include "runtime/ops/cuda/embedding_cuda.h"
#include "runtime/ops/cuda/gated_delta_net_cuda.h"
#include "runtime/ops/cuda/head_loss_cuda.h"
#include "runtime/ops/cuda/mixer_cuda.h"
#include "runtime/ops/cuda/mixture_cuda.h"
#include "runtime/ops/device_operators.h"

namespace oom {
namespace {

bool Serves(const at::Tensor& x) { return x.is_cuda() && x.scalar_type() == at::kBFloat16; }

// Norms behind mixer and mixture, and a cap of the logits, the composites alone know.
bool ServesMixer(const ModelDescription& model, const LayerDescription& layer) {
  if (model.branch_norms) return false;
  return layer.mixer == MixerKind::kDeltaNet ? CudaServesDeltaNet(layer.delta_net)
                                             : CudaServesAttention(layer.attention);
}

bool ServesMixture(const ModelDescription& model, const LayerDescription& layer) {
  return !model.branch_norms && CudaServesMixture(model, layer);
}

bool ServesHead(const ModelDescription& model) { return model.logit_cap == 0.0; }

}  // namespace

void InstallCudaOperators() {
  RegisterDeviceOperators({.serves = Serves,
                           .serves_mixer = ServesMixer,
                           .serves_mixture = ServesMixture,
                           .serves_head = ServesHead,
                           .mixer_forward = CudaMixerForward,
                           .mixer_backward = CudaMixerBackward,
                           .delta_mixer_forward = CudaDeltaMixerForward,
                           .delta_mixer_backward = CudaDeltaMixerBackward,
                           .mixture_forward = CudaMixtureForward,
                           .mixture_backward = CudaMixtureBackward,
                           .head_loss = CudaHeadLoss,
                           .embedding_backward_by_row = CudaEmbeddingBackwardByRow});
}

}  // namespace oom
