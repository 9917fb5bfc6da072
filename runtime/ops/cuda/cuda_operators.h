// The operators of NVIDIA GPUs: BF16 activations through the kernels of runtime/kernels, cuBLAS,
// cuDNN and LibTorch's attention and grouped product. They enqueue on LibTorch's current stream and
// never wait for the device. Other types take the composites there, and so do, whatever the type,
// layers that no kernel serves: Gated DeltaNet with heads other than 128 or taps other than four,
// attention heads above 512 or of no multiple of 8, more than 512 experts or 16 of them a token
// (gpu_kernels.h). Composites may wait. Below compute capability 9.0 LibTorch's grouped product
// itself waits for the device.

#pragma once

namespace oom {

// Once, before the first operator runs.
void InstallCudaOperators();

}  // namespace oom
