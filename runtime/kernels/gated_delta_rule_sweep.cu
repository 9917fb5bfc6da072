// The state's gradient E through a document's chunks in reverse, all transposed:
//   dR.T = do.T P + e^(G_last - G) (E.T k.T);  dW.T = dR.T B;
//   E.T <- e^G_last E.T + (s e^G do).T q - (e^G dW).T k.
// q's tile is read last; it is under way while the rest is worked on.

#include "runtime/kernels/gated_delta_rule_scale.cuh"
#include "runtime/kernels/gated_delta_rule_scan.cuh"
#include "runtime/kernels/launch.h"

namespace oom::internal {
namespace {

// The lane's pairs of tokens of a factor, times their gate.
__device__ __forceinline__ uint32_t TimesGate(uint32_t pair, float2 gate, float factor) {
  const float2 x = UnpackHalves(pair);
  return PackHalves(x.x * (factor * gate.x), x.y * (factor * gate.y));
}

template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 ? 2 : 4)
    SweepKernel(DeltaStage stage, const float* dstate_DNKV, GatedDeltaRuleKernelGradients gradients,
                float scale) {
  using L = ScanLayout<kWarps>;
  extern __shared__ __align__(128) unsigned char shared[];
  const ScanPlace<kWarps> place(stage.shape);
  const int lane = threadIdx.x % 32;
  const int warp_v = static_cast<int>(threadIdx.x / 32) * 16;
  const int first = stage.input.document_chunks[place.document];
  const int last = stage.input.document_chunks[place.document + 1] - 1;
  const int64_t state_place =
      (place.document * stage.shape.value_heads + place.head) * int64_t{kStateElements} +
      place.first_v + warp_v;
  const float gradient_scale = GradientScale(stage.scratch.magnitude[place.key_head]);
  const float gradient_unit = 1.0f / gradient_scale;

  float state[16][4];
  LoadState(state, dstate_DNKV == nullptr ? nullptr : dstate_DNKV + state_place, gradient_scale);
  if (first <= last) {
    LoadStage(stage, place, last, stage.scratch.doutput, true, shared + L::kStage);
    CommitCopies();
  }
  for (int index = last; index >= first; --index) {
    unsigned char* const tiles = shared + L::kStage + (last - index) % 2 * L::kStageBytes;
    const unsigned char* const gates = tiles + L::kGates;
    const int64_t tile = int64_t{index} * stage.shape.value_heads + place.head;
    const DeltaChunk chunk = stage.input.chunks[index];
    WaitForCopies<0>();
    __syncthreads();
    LoadQueries(stage, place, index, shared + L::kQuery);
    CommitCopies();
    if (index > first) {
      LoadStage(stage, place, index - 1, stage.scratch.doutput, true,
                shared + L::kStage + (last - index + 1) % 2 * L::kStageBytes);
    }
    CommitCopies();

    float sums[8][4] = {};
    {
      uint32_t factor[8][4];
      Factors(factor, state);
      StoreState(stage.scratch.dstates + tile * kStateElements, place.first_v + warp_v, factor);
      AddProductWithRows(sums, factor, tiles + L::kKey);
    }
    ScaleTokens(sums, gates, kUntilEnd, 1.0f);
    uint32_t doutput[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      LoadFactorATransposed<L::kColumns>(doutput[k], tiles + L::kValue, warp_v, k * 16);
    }
    AddProductWithLower(sums, doutput, tiles + L::kScores);
    uint32_t factor[4][4];
    Factors(factor, sums);
    StoreTokens(stage.scratch.dwritten + tile * kTokenElements, place.first_v + warp_v, factor);
    float dmissing[8][4] = {};
    AddProductWithLower(dmissing, factor, tiles + L::kWrite);
    float* const dvalue = gradients.value_TNV + place.Value(chunk) + warp_v + lane / 4;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = 8 * n + 2 * (lane % 4) + e % 2;
        if (token < chunk.count) {
          dvalue[token * place.value_stride + e / 2 * 8] = gradient_unit * dmissing[n][e];
        }
      }
    }
    ScaleTokens(dmissing, gates, kSinceStart, -1.0f);
    Factors(factor, dmissing);
    StoreTokens(stage.scratch.dread + tile * kTokenElements, place.first_v + warp_v, factor);

    const float whole =
        reinterpret_cast<const float*>(gates)[kSinceStart * kDeltaChunk + kDeltaChunk - 1];
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n][e] *= whole;
    }
    AddProductOverRows(state, factor, tiles + L::kKey);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        doutput[k][i] =
            TimesGate(doutput[k][i], GatePair(gates, kSinceStart, 2 * k + i / 2), scale);
      }
    }
    WaitForCopies<1>();
    __syncthreads();
    AddProductOverRows(state, doutput, shared + L::kQuery);
  }
  if (gradients.state_DNKV != nullptr) {
    StoreWideState(gradients.state_DNKV + state_place, state, gradient_unit);
  }
}

}  // namespace

void SweepDeltaChunks(const DeltaStage& stage, const GatedDeltaRuleOutputGradient& doutput,
                      const GatedDeltaRuleKernelGradients& gradients, cudaStream_t stream) {
  const float scale = 1.0f / sqrtf(static_cast<float>(kDeltaHeadSize));
  if (ScanTakesFourWarps(stage.shape)) {
    LaunchScan<4>(SweepKernel<4>, stage.shape, stream, stage, doutput.state_DNKV, gradients, scale);
  } else {
    LaunchScan<2>(SweepKernel<2>, stage.shape, stream, stage, doutput.state_DNKV, gradients, scale);
  }
  CheckLaunch("SweepDeltaChunks");
}

}  // namespace oom::internal
