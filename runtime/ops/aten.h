// The one door to LibTorch's operators, precompiled: at:: functions and tensors, no autograd, no
// modules. Nothing outside runtime/ops, device, comm and worker includes this.

#pragma once

#include <ATen/ATen.h>
