// What attention_products_sm90.cu does with a warp's 16 rows of a tile of sums as wgmma leaves
// them: a thread has two rows, `kRowsApart` apart, and of each 64 columns (hopper_wgmma.cuh). Four
// neighbouring lanes have the same rows.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "runtime/kernels/attention_tiles.cuh"
#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/hopper_tensor_map.cuh"
#include "runtime/kernels/hopper_wgmma.cuh"

namespace oom::attention {

constexpr int kRowsApart = 8;
constexpr int kEights = kTileColumns / 8;  // sum[4 * j + 0..3] are of columns 8 * j + 0..7.

// A warp's results on their way out: boxes of 16 rows and 64 columns, one filled while one leaves.
constexpr int kOutBoxRows = 16;
constexpr int kOutBoxColumns = hopper::kBoxRowBytes / static_cast<int>(sizeof(__nv_bfloat16));
constexpr int kOutBoxBytes = kOutBoxRows * hopper::kBoxRowBytes;
constexpr int kOutBoxesOfWarp = 2;

__device__ __forceinline__ uint32_t Rounded(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// What both directions know of the warp's rows.
class Rows {
 public:
  __device__ Rows(const Problem& problem, int group, int first_row, unsigned char* boxes)
      : problem_(problem),
        boxes_(boxes),
        group_(group),
        first_row_(first_row),
        lane_(threadIdx.x % 32) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = first_row + lane_ / 4 + k * kRowsApart;
      const Seen seen = Exists(k) ? SeenBy(problem.block, row) : Seen{0, 0};
      first_[k] = seen.first;
      count_[k] = seen.end > seen.first ? seen.end - seen.first : 0;
    }
  }

 protected:
  __device__ bool Exists(int k) const {
    return first_row_ + lane_ / 4 + k * kRowsApart < problem_.block.rows;
  }
  // Of this thread's row k among those of all groups.
  __device__ int64_t Index(int k) const {
    return group_ * problem_.block.rows + first_row_ + lane_ / 4 + k * kRowsApart;
  }
  // Whether all rows of the warp see the whole tile.
  __device__ __forceinline__ bool AllSee(int tile) const {
    const int column = tile * kTileColumns;
    bool all = true;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      all = all && first_[k] <= column && first_[k] + count_[k] >= column + kTileColumns;
    }
    return __all_sync(~0u, all);
  }
  // Whether row k sees the column of sum[4 * j + 2 * k + i].
  __device__ __forceinline__ bool Sees(int tile, int k, int j, int i) const {
    const int column = tile * kTileColumns + 2 * (lane_ % 4);
    return static_cast<unsigned>(column - first_[k] + 8 * j + i) <
           static_cast<unsigned>(count_[k]);
  }

  // Writes zeros to the warp's part of a tile.
  __device__ void StoreZeros(__nv_bfloat16* result_GRC, int tile) const {
    const int column = tile * kTileColumns + lane_ * 8;
    if (column >= problem_.block.row_stride) return;
#pragma unroll 1
    for (int i = 0; i < kOutBoxRows; ++i) {
      if (first_row_ + i >= problem_.block.rows) return;
      const int64_t row = group_ * problem_.block.rows + first_row_ + i;
      *reinterpret_cast<uint4*>(result_GRC + row * problem_.block.row_stride + column) =
          make_uint4(0, 0, 0, 0);
    }
  }

  // Writes the warp's part of a tile: pair(p) gives the values 2 * p and 2 * p + 1, rounded.
  template <class Pair>
  __device__ __forceinline__ void StoreTile(const CUtensorMap& map, int tile,
                                            const Pair& pair) const {
#pragma unroll
    for (int i = 0; i < kTileColumns / kOutBoxColumns; ++i) {
      const int first_column = tile * kTileColumns + i * kOutBoxColumns;
      if (first_column >= problem_.block.columns) continue;
      unsigned char* const box = boxes_ + i % kOutBoxesOfWarp * kOutBoxBytes;
      // The tile before may have ended with any of the boxes.
      if (i == 0 && lane_ == 0) hopper::WaitForBoxReads<0>();
      if (i >= kOutBoxesOfWarp && lane_ == 0) hopper::WaitForBoxReads<kOutBoxesOfWarp - 1>();
      __syncwarp();
      const int box_row = lane_ % 16;
#pragma unroll
      for (int two = 0; two < kOutBoxColumns / 16; ++two) {
        const int first = (i * (kOutBoxColumns / 8) + two * 2) * 2;
        const int piece = (two * 2 + lane_ / 16) ^ (box_row % 8);
        hopper::StoreMatrices(box + box_row * hopper::kBoxRowBytes + piece * 16,
                              {pair(first), pair(first + 1), pair(first + 2), pair(first + 3)});
      }
      hopper::FenceAsyncProxy();
      __syncwarp();
      if (lane_ == 0) {
        hopper::StoreBox(&map, box, group_, first_row_, first_column);
        hopper::CommitBoxes();
      }
    }
  }

  const Problem& problem_;
  unsigned char* const boxes_;
  const int group_;
  const int first_row_;
  const int lane_;
  int first_[2];
  int count_[2];
};

// Forward: the online softmax of a unit's tiles from left to right.
class SoftmaxRows : private Rows {
 public:
  __device__ SoftmaxRows(const Problem& problem, int group, int first_row, unsigned char* boxes)
      : Rows(problem, group, first_row, boxes) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const bool has_state = !problem.first && Exists(k);
      base_[k] = has_state ? problem.state.maximum_GR[Index(k)] : -INFINITY;
      // Each lane adds its own columns; the sum so far is one lane's.
      const bool has_sums = has_state && lane_ % 4 == 0;
      sum_[k] = has_sums ? problem.state.sum_GR[Index(k)] : 0.0f;
      weight_[k] = has_sums ? problem.state.weight_GR[Index(k)] : 0.0f;
    }
  }

  __device__ void PassUnseen(int tile) const { StoreZeros(problem_.probabilities_GRC, tile); }

  __device__ __forceinline__ void TakeScores(float (&sum)[128], int tile, const CUtensorMap& map) {
    const float unit = problem_.block.scale * internal::kLog2E;
    if (!AllSee(tile)) {
#pragma unroll
      for (int p = 0; p < 2 * kEights; ++p) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!Sees(tile, p % 2, p / 2, i)) sum[2 * p + i] = -INFINITY;
        }
      }
    }
    float greatest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int p = 0; p < 2 * kEights; ++p) {
      greatest[p % 2] = fmaxf(greatest[p % 2], fmaxf(sum[2 * p], sum[2 * p + 1]));
    }
    const bool above = greatest[0] * unit > base_[0] + kSoftmaxHeadroom ||
                       greatest[1] * unit > base_[1] + kSoftmaxHeadroom;
    if (__any_sync(~0u, above)) RaiseBase(greatest, unit, tile);

    // A row that has seen nothing yet has no base; any finite one gives zeros.
    const float base[2] = {base_[0] == -INFINITY ? 0.0f : base_[0],
                           base_[1] == -INFINITY ? 0.0f : base_[1]};
    float sums[2][2] = {}, weights[2][2] = {};
#pragma unroll
    for (int p = 0; p < 2 * kEights; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = sum[2 * p + i];
        x = internal::ApproximateExp2(fmaf(x, unit, -base[p % 2]));
        sums[p % 2][i] += x;
      }
      const uint32_t rounded = Rounded(sum[2 * p], sum[2 * p + 1]);
      weights[p % 2][0] += __uint_as_float(rounded << 16);
      weights[p % 2][1] += __uint_as_float(rounded & 0xFFFF0000u);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      sum_[k] += sums[k][0] + sums[k][1];
      weight_[k] += weights[k][0] + weights[k][1];
    }
    StoreTile(map, tile, [&](int p) { return Rounded(sum[2 * p], sum[2 * p + 1]); });
  }

  __device__ void Finish() {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float sum = sum_[k], weight = weight_[k];
#pragma unroll
      for (int offset = 1; offset <= 2; offset *= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
        weight += __shfl_xor_sync(~0u, weight, offset);
      }
      if (lane_ % 4 != 0 || !Exists(k)) continue;
      problem_.state.maximum_GR[Index(k)] = base_[k];
      problem_.state.sum_GR[Index(k)] = sum;
      problem_.state.weight_GR[Index(k)] = weight;
    }
  }

 private:
  // 2^exponent of a whole number, 0 where it is tiny.
  static __device__ float PowerOfTwo(float exponent) {
    return exponent < -126.0f ? 0.0f : __int_as_float((static_cast<int>(exponent) + 127) << 23);
  }

  // Gives rows whose scores are far above their base a new one. `greatest`: of this thread's
  // columns of the tile.
  __device__ __forceinline__ void RaiseBase(const float (&greatest)[2], float unit, int tile) {
    float factors[2];
    bool rescales = false;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float x = greatest[k];
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      factors[k] = 1.0f;
      if (!(x * unit > base_[k] + kSoftmaxHeadroom)) continue;
      const float base = ceilf(x * unit);
      if (base_[k] != -INFINITY) {
        factors[k] = PowerOfTwo(base_[k] - base);
        sum_[k] *= factors[k];
        weight_[k] *= factors[k];
        rescales = true;
      }
      base_[k] = base;
    }
    if (__any_sync(~0u, rescales)) RescaleRows(factors, tile);
  }

  // Multiplies what there is of the warp's rows: probabilities left of the tile, and the output of
  // earlier blocks of keys.
  __device__ __forceinline__ void RescaleRows(const float (&factors)[2], int tile) const {
    // The copy engine wrote the probabilities, past the L1 cache.
    if (lane_ == 0) hopper::WaitForBoxes();
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kOutBoxRows; ++i) {
      const float upper = __shfl_sync(~0u, factors[0], i % kRowsApart * 4);
      const float lower = __shfl_sync(~0u, factors[1], i % kRowsApart * 4);
      const float factor = i < kRowsApart ? upper : lower;
      if (factor == 1.0f) continue;
      const int64_t row = group_ * problem_.block.rows + first_row_ + i;
      auto* const pairs = reinterpret_cast<uint32_t*>(problem_.probabilities_GRC +
                                                      row * problem_.block.row_stride);
      for (int j = lane_; j < tile * kTileColumns / 2; j += 32) {
        const uint32_t pair = __ldcg(pairs + j);
        pairs[j] = Rounded(__uint_as_float(pair << 16) * factor,
                           __uint_as_float(pair & 0xFFFF0000u) * factor);
      }
      if (problem_.first) continue;
      float* const output = problem_.state.output_GRd + row * problem_.state.head_size;
      for (int j = lane_; j < problem_.state.head_size; j += 32) output[j] *= factor;
    }
    __syncwarp();
  }

  float base_[2];
  float sum_[2];
  float weight_[2];
};

// Backward. Between a tile's two products the probabilities wait packed in half precision, which of
// its 11 bits loses none to what they are rounded to in the end, times 2^15: so those down to 2^-29
// keep them, and 1 is in range.
class GradientRows : private Rows {
 public:
  __device__ GradientRows(const Problem& problem, int group, int first_row, unsigned char* boxes)
      : Rows(problem, group, first_row, boxes) {
    const ScoreBlock& block = problem.block;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = first_row + lane_ / 4 + k * kRowsApart;
      const int64_t token = block.first_token + row / block.heads_of_group;
      const int64_t head = group * block.heads_of_group + row % block.heads_of_group;
      const int64_t index = token * block.group_count * block.heads_of_group + head;
      logsumexp_[k] = Exists(k) ? problem.logsumexp_TN[index] * internal::kLog2E : 0.0f;
      delta_[k] = Exists(k) ? problem.delta_TN[index] : 0.0f;
    }
  }

  __device__ void PassUnseen(int tile) const {
    StoreZeros(problem_.probabilities_GRC, tile);
    StoreZeros(problem_.dscores_GRC, tile);
  }

  __device__ __forceinline__ void TakeScores(float (&sum)[128], int tile, const CUtensorMap& map) {
    const float unit = problem_.block.scale * internal::kLog2E;
    const float base[2] = {kPackedBits - logsumexp_[0], kPackedBits - logsumexp_[1]};
#pragma unroll
    for (int p = 0; p < 2 * kEights; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[2 * p + i] = internal::ApproximateExp2(fmaf(sum[2 * p + i], unit, base[p % 2]));
      }
    }
    if (!AllSee(tile)) {
#pragma unroll
      for (int p = 0; p < 2 * kEights; ++p) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!Sees(tile, p % 2, p / 2, i)) sum[2 * p + i] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int p = 0; p < 2 * kEights; ++p) {
      packed_[p] = __floats2half2_rn(sum[2 * p], sum[2 * p + 1]);
    }
    StoreTile(map, tile, [&](int p) {
      return Rounded(sum[2 * p] * kUnpacked, sum[2 * p + 1] * kUnpacked);
    });
  }

  __device__ __forceinline__ void TakeGradients(float (&sum)[128], int tile,
                                                const CUtensorMap& map) const {
    const float scale = problem_.block.scale * kUnpacked;
    StoreTile(map, tile, [&](int p) {
      const float2 probability = __half22float2(packed_[p]);
      return Rounded(probability.x * scale * (sum[2 * p] - delta_[p % 2]),
                     probability.y * scale * (sum[2 * p + 1] - delta_[p % 2]));
    });
  }

 private:
  static constexpr float kPackedBits = 15.0f;
  static constexpr float kUnpacked = 1.0f / 32768.0f;

  float logsumexp_[2];
  float delta_[2];
  __half2 packed_[2 * kEights];
};

}  // namespace oom::attention
