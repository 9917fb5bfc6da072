// LibTorch's automatic differentiation, for tests alone: what each hand-written backward is held
// against.

#pragma once

#include <torch/csrc/autograd/autograd.h>

#include "runtime/ops/aten.h"
