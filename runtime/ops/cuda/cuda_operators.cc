#include "runtime/ops/cuda/cuda_operators.h"

#include "runtime/ops/cuda/delta_mixer_cuda.h"
#include "runtime/ops/cuda/embedding_cuda.h"
#include "runtime/ops/cuda/head_loss_cuda.h"
#include "runtime/ops/cuda/mixer_cuda.h"
#include "runtime/ops/cuda/mixture_cuda.h"
#include "runtime/ops/device_operators.h"
#include "runtime/ops/gpu_kernels.h"

namespace oom {
namespace {

bool Serves(const at::Tensor& x) { return x.is_cuda() && x.scalar_type() == at::kBFloat16; }

}  // namespace

void InstallCudaOperators() {
  RegisterDeviceOperators({.serves = Serves,
                           .serves_mixer = GpuKernelsServeMixer,
                           .serves_mixture = GpuKernelsServeMixture,
                           .mixer_forward = CudaMixerForward,
                           .mixer_backward = CudaMixerBackward,
                           .finish_mixer = CudaFinishMixer,
                           .begin_mixer_backward = CudaBeginMixerBackward,
                           .delta_mixer_forward = CudaDeltaMixerForward,
                           .delta_mixer_backward = CudaDeltaMixerBackward,
                           .mixture_forward = CudaMixtureForward,
                           .mixture_backward = CudaMixtureBackward,
                           .head_loss = CudaHeadLoss,
                           .embedding_backward_by_row = CudaEmbeddingBackwardByRow});
}

}  // namespace oom
