#include "runtime/ops/causal_convolution.h"

#include "runtime/ops/precision.h"
#include "runtime/ops/segment.h"

namespace oom {
namespace {

// A document's rows with its context before them, [P + L, C], in x's type.
at::Tensor WithContext(const at::Tensor& x_TC, const at::Tensor& context_DPC, int64_t taps,
                       int64_t document, const std::vector<int64_t>& cu_seqlens) {
  const int64_t first = cu_seqlens[static_cast<size_t>(document)];
  const int64_t end = cu_seqlens[static_cast<size_t>(document) + 1];
  return at::cat({CarriedBy(context_DPC, document, {taps - 1, x_TC.size(1)}, x_TC.options()),
                  x_TC.narrow(0, first, end - first)});
}

// sums_LC = sum over taps j of w_j * rows [j, j + L).
void Convolve(const at::Tensor& extended, const at::Tensor& taps_JC, at::Tensor sums_LC) {
  const int64_t length = sums_LC.size(0);
  sums_LC.zero_();
  for (int64_t j = 0; j < taps_JC.size(0); ++j) {
    sums_LC.addcmul_(Wide(extended.narrow(0, j, length)), taps_JC.select(0, j));
  }
}

}  // namespace

CausalConvolutionOutput CausalConvolutionForward(const at::Tensor& x_TC,
                                                 const at::Tensor& weight_CJ,
                                                 const at::Tensor& context_DPC,
                                                 const std::vector<int64_t>& cu_seqlens) {
  CheckSegment(cu_seqlens, x_TC.size(0));
  const int64_t taps = weight_CJ.size(1);
  const int64_t documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  const at::Tensor taps_JC = Wide(weight_CJ).t().contiguous();
  at::Tensor sums_TC = at::empty(x_TC.sizes(), taps_JC.options());
  CausalConvolutionOutput result;
  result.context_DPC = at::empty({documents, taps - 1, x_TC.size(1)}, x_TC.options());
  for (int64_t document = 0; document < documents; ++document) {
    const at::Tensor extended = WithContext(x_TC, context_DPC, taps, document, cu_seqlens);
    const int64_t length = extended.size(0) - (taps - 1);
    Convolve(extended, taps_JC,
             sums_TC.narrow(0, cu_seqlens[static_cast<size_t>(document)], length));
    result.context_DPC.select(0, document).copy_(extended.narrow(0, length, taps - 1));
  }
  result.y_TC = at::silu_(sums_TC).to(x_TC.scalar_type());
  return result;
}

CausalConvolutionGradients CausalConvolutionBackward(const CausalConvolutionBackwardInput& input,
                                                     const at::Tensor& weight_CJ,
                                                     const std::vector<int64_t>& cu_seqlens,
                                                     at::Tensor dweight_CJ) {
  const at::Tensor& x_TC = input.x_TC;
  CheckSegment(cu_seqlens, x_TC.size(0));
  const int64_t taps = weight_CJ.size(1);
  const int64_t documents = static_cast<int64_t>(cu_seqlens.size()) - 1;
  const at::Tensor taps_JC = Wide(weight_CJ).t().contiguous();
  CausalConvolutionGradients result;
  result.x_TC = at::empty(x_TC.sizes(), x_TC.options());
  if (input.context_DPC.defined()) {
    result.context_DPC = at::empty(input.context_DPC.sizes(), taps_JC.options());
  }
  for (int64_t document = 0; document < documents; ++document) {
    const int64_t first = cu_seqlens[static_cast<size_t>(document)];
    const at::Tensor extended =
        Wide(WithContext(x_TC, input.context_DPC, taps, document, cu_seqlens));
    const int64_t length = extended.size(0) - (taps - 1);
    at::Tensor sums_LC = at::empty({length, x_TC.size(1)}, taps_JC.options());
    Convolve(extended, taps_JC, sums_LC);
    const at::Tensor dsums_LC =
        at::silu_backward(Wide(input.dy_TC.narrow(0, first, length)), sums_LC);

    at::Tensor dextended = at::zeros(extended.sizes(), extended.options());
    dextended.narrow(0, length, taps - 1)
        .add_(
            CarriedBy(input.dcontext_DPC, document, {taps - 1, x_TC.size(1)}, extended.options()));
    for (int64_t j = 0; j < taps; ++j) {
      dextended.narrow(0, j, length).addcmul_(dsums_LC, taps_JC.select(0, j));
      dweight_CJ.select(1, j).add_(at::mul(dsums_LC, extended.narrow(0, j, length)).sum(0));
    }
    result.x_TC.narrow(0, first, length).copy_(dextended.narrow(0, taps - 1, length));
    if (result.context_DPC.defined()) {
      result.context_DPC.select(0, document).copy_(dextended.narrow(0, 0, taps - 1));
    }
  }
  return result;
}

}  // namespace oom
