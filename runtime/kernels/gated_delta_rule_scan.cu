// The state through a document's chunks, all transposed:
//   (k S).T = S.T k.T;  R.T = W.T B.T;  o.T = s e^G (S.T q.T) + R.T P.T;
//   S.T <- e^G_last S.T + (e^(G_last - G) R).T k.
// q's tile is read first, then replaced by the next chunk's.

#include "runtime/kernels/gated_delta_rule_scan.cuh"
#include "runtime/kernels/launch.h"

namespace oom::internal {
namespace {

// o of a warp's 16 columns of v.
__device__ __forceinline__ void StoreOutput(__nv_bfloat16* output, int64_t stride, int tokens,
                                            const float (&sums)[8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint32_t left = Transposed(PackBfloat16(sums[n][0], sums[n][1]));
    const uint32_t right = Transposed(PackBfloat16(sums[n][2], sums[n][3]));
    const int token = 8 * n + lane / 4;
    if (token < tokens) {
      uint32_t* const row = reinterpret_cast<uint32_t*>(output + token * stride);
      row[lane % 4] = left;
      row[4 + lane % 4] = right;
    }
  }
}

// kBackward: keeps what backward needs instead of making o.
template <int kWarps, bool kBackward>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 ? 2 : 4)
    ScanKernel(DeltaStage stage, GatedDeltaRuleKernelOutput output, float scale) {
  using L = ScanLayout<kWarps>;
  extern __shared__ __align__(128) unsigned char shared[];
  const ScanPlace<kWarps> place(stage.shape);
  const int warp_v = static_cast<int>(threadIdx.x / 32) * 16;
  const int first = stage.input.document_chunks[place.document];
  const int end = stage.input.document_chunks[place.document + 1];
  const int64_t state_place =
      (place.document * stage.shape.value_heads + place.head) * int64_t{kStateElements} +
      place.first_v + warp_v;

  float state[16][4];
  LoadState(state,
            stage.input.state_DNKV == nullptr ? nullptr : stage.input.state_DNKV + state_place,
            1.0f);
  if (first < end) {
    LoadStage(stage, place, first, stage.input.value_TNV, !kBackward, shared + L::kStage);
    if constexpr (!kBackward) LoadQueries(stage, place, first, shared + L::kQuery);
    CommitCopies();
  }
  for (int index = first; index < end; ++index) {
    unsigned char* const tiles = shared + L::kStage + (index - first) % 2 * L::kStageBytes;
    const unsigned char* const gates = tiles + L::kGates;
    const int64_t tile = int64_t{index} * stage.shape.value_heads + place.head;
    WaitForCopies<0>();
    __syncthreads();
    if (index + 1 < end) {
      LoadStage(stage, place, index + 1, stage.input.value_TNV, !kBackward,
                shared + L::kStage + (index + 1 - first) % 2 * L::kStageBytes);
    }
    CommitCopies();

    float sums[8][4] = {};  // k S, then W, both transposed, as everything here.
    float out[8][4] = {};
    {
      uint32_t factor[8][4];
      Factors(factor, state);
      if constexpr (kBackward) {
        StoreState(stage.scratch.states + tile * kStateElements, place.first_v + warp_v, factor);
      }
      AddProductWithRows(sums, factor, tiles + L::kKey);
      if constexpr (!kBackward) {
        AddProductWithRows(out, factor, shared + L::kQuery);
        __syncthreads();
        if (index + 1 < end) LoadQueries(stage, place, index + 1, shared + L::kQuery);
        CommitCopies();
      }
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t value[4];
      const int lane = threadIdx.x % 32;
      const unsigned char* const piece =
          tiles + L::kValue +
          PieceOffset<L::kColumns>(8 * n, lane / 16 * 8 + lane % 8, warp_v, lane / 8 % 2);
      LoadMatricesTransposed(value, SharedAddressOf(piece));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 gate = GatePair(gates, kSinceStart, n + i);
        const float2 low = UnpackBfloat16(value[2 * i]), high = UnpackBfloat16(value[2 * i + 1]);
        sums[n + i][0] = low.x - gate.x * sums[n + i][0];
        sums[n + i][1] = low.y - gate.y * sums[n + i][1];
        sums[n + i][2] = high.x - gate.x * sums[n + i][2];
        sums[n + i][3] = high.y - gate.y * sums[n + i][3];
      }
    }
    uint32_t factor[4][4];
    Factors(factor, sums);
    if constexpr (kBackward) {
      StoreTokens(stage.scratch.missing + tile * kTokenElements, place.first_v + warp_v, factor);
    }
    float written[8][4] = {};
    AddProductWithLowerTransposed(written, factor, tiles + L::kWrite);
    if constexpr (kBackward) {
      Factors(factor, written);
      StoreTokens(stage.scratch.written + tile * kTokenElements, place.first_v + warp_v, factor);
    } else {
      Factors(factor, written);
      ScaleTokens(out, gates, kSinceStart, scale);
      AddProductWithLowerTransposed(out, factor, tiles + L::kScores);
      const DeltaChunk chunk = stage.input.chunks[index];
      StoreOutput(output.output_TNV + place.Value(chunk) + warp_v, place.value_stride, chunk.count,
                  out);
    }
    ScaleTokens(written, gates, kUntilEnd, 1.0f);
    Factors(factor, written);
    const float whole =
        reinterpret_cast<const float*>(gates)[kSinceStart * kDeltaChunk + kDeltaChunk - 1];
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n][e] *= whole;
    }
    AddProductOverRows(state, factor, tiles + L::kKey);
  }
  if (output.state_DNKV != nullptr) StoreWideState(output.state_DNKV + state_place, state, 1.0f);
}

template <bool kBackward>
void Scan(const DeltaStage& stage, const GatedDeltaRuleKernelOutput& output, cudaStream_t stream) {
  const float scale = 1.0f / sqrtf(static_cast<float>(kDeltaHeadSize));
  if (ScanTakesFourWarps(stage.shape)) {
    LaunchScan<4>(ScanKernel<4, kBackward>, stage.shape, stream, stage, output, scale);
  } else {
    LaunchScan<2>(ScanKernel<2, kBackward>, stage.shape, stream, stage, output, scale);
  }
  CheckLaunch("ScanDeltaChunks");
}

}  // namespace

void ScanDeltaChunks(const DeltaStage& stage, const GatedDeltaRuleKernelOutput& output,
                     cudaStream_t stream) {
  Scan<false>(stage, output, stream);
}

void ScanDeltaChunksForBackward(const DeltaStage& stage, cudaStream_t stream) {
  Scan<true>(stage, {}, stream);
}

}  // namespace oom::internal
