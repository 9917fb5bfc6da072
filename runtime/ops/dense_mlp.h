// Dense gated MLP, of a layer without experts or beside them: y = a Wd.T, a = GLU(n Wgu.T), GLU the
// gated activation (swiglu.h).
// Backward: da = dy Wd, dWd += dy.T a;  dgate_up = GLU backward of da;  dWgu += dgate_up.T n,
// dn = dgate_up Wgu.  Shapes: T tokens, H hidden, I width, F = 2I. Only gate_up is kept.

#pragma once

#include "runtime/model/description.h"
#include "runtime/ops/aten.h"

namespace oom {

at::Tensor DenseGateUpForward(const at::Tensor& normed_TH, const at::Tensor& gate_up_FH);
at::Tensor DenseDownForward(const at::Tensor& gate_up_TF, const at::Tensor& down_HI,
                            Activation activation);

// dn, wide. `dgate_up_FH` and `ddown_HI` accumulate.
at::Tensor DenseMlpBackward(const at::Tensor& dy_TH, const at::Tensor& normed_TH,
                            const at::Tensor& gate_up_TF, const at::Tensor& gate_up_FH,
                            const at::Tensor& down_HI, Activation activation,
                            at::Tensor dgate_up_FH, at::Tensor ddown_HI);

}  // namespace oom
