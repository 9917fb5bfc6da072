#include <cuda_pipeline.h>
#include <thrust/iterator/counting_iterator.h>

#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>

#include "runtime/base/check.h"
#include "runtime/kernels/embedding.h"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/row_vector.cuh"
#include "runtime/kernels/token_rows.h"

namespace oom {
namespace {

constexpr int kThreads = 256;
// Rows with more tokens than this are summed by the kernel that streams: additions in one column
// follow each other, so what counts there is that loads run ahead of them.
constexpr int kFewTokens = 32;
constexpr int kTokensInFlight = 4;
// Blocks that share the rows; enough for eight on each of 256 multiprocessors.
constexpr int64_t kRowBlocks = 2048;

__global__ void __launch_bounds__(kThreads) CountUpKernel(int count, int32_t* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = static_cast<int32_t>(i);
}

// One past the last place of row u.
__device__ int RowEnd(const TokenGroups& groups, int row, int row_count, int token_count) {
  return row + 1 < row_count ? groups.first_U[row + 1] : token_count;
}

// One thread a place of position_T: finds its row.
__global__ void __launch_bounds__(kThreads) IndexKernel(TokenGroups groups, int token_count) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= token_count) return;
  const int row_count = *groups.count;
  int row = 0;  // The last row that begins at or before the place.
  for (int above = row_count; above - row > 1;) {
    const int middle = row + (above - row) / 2;
    if (groups.first_U[middle] <= place) {
      row = middle;
    } else {
      above = middle;
    }
  }
  if (groups.index_T != nullptr) groups.index_T[groups.position_T[place]] = row;
  if (place == groups.first_U[row] &&
      RowEnd(groups, row, row_count, token_count) - place > kFewTokens) {
    groups.frequent[atomicAdd(groups.frequent_count, 1)] = row;
  }
}

// Blocks (x) stride over rows, (y) are runs of columns. Rows with more than `most_tokens` tokens
// are left out.
template <class T, class Sum, bool kAccumulate, int kVector>
__global__ void __launch_bounds__(kThreads)
    FewTokensKernel(EmbeddingShape shape, const T* __restrict__ dy_TH, TokenGroups groups,
                    int most_tokens, Sum* __restrict__ sum) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kVector;
  if (column >= shape.hidden_size) return;
  const int row_count = *groups.count;
  for (int64_t at = blockIdx.x; at < row_count; at += gridDim.x) {
    const int row = static_cast<int>(at);
    const int first = groups.first_U[row];
    const int last = RowEnd(groups, row, row_count, static_cast<int>(shape.token_count));
    if (last - first > most_tokens) continue;
    const int64_t target_row = kAccumulate ? groups.row_U[row] : row;
    Sum* target = sum + target_row * shape.hidden_size + column;

    float total[kVector];
    constexpr int kPiece = kVector < kWholeVector<Sum> ? kVector : kWholeVector<Sum>;
    using Piece = RowVector<Sum, kPiece>;
#pragma unroll
    for (int v = 0; v < kVector; v += kPiece) {
      Piece piece;
      if constexpr (kAccumulate) piece = *reinterpret_cast<const Piece*>(target + v);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) total[v + i] = kAccumulate ? piece.Get(i) : 0.0f;
    }
    for (int place = first; place < last; place += kTokensInFlight) {
      RowVector<T, kVector> dy[kTokensInFlight];
#pragma unroll
      for (int i = 0; i < kTokensInFlight; ++i) {
        if (place + i < last) {
          dy[i] = *reinterpret_cast<const RowVector<T, kVector>*>(
              dy_TH + groups.position_T[place + i] * shape.hidden_size + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokensInFlight; ++i) {
        if (place + i >= last) break;
#pragma unroll
        for (int v = 0; v < kVector; ++v) total[v] += dy[i].Get(v);
      }
    }
#pragma unroll
    for (int v = 0; v < kVector; v += kPiece) {
      Piece piece;
      piece.Set(total + v);
      *reinterpret_cast<Piece*>(target + v) = piece;
    }
  }
}

// A block sums 64 columns of a row that has many tokens: tiles of 8 KiB of dy go through shared
// memory, several under way, while one thread a column adds.
constexpr int kSliceColumns = 64;
constexpr int kStreamThreads = 128;
constexpr int kStages = 4;
constexpr int kTileBytes = 8192;

// Blocks (x) stride over the frequent rows, (y) are slices of columns. REQUIRES: rows of dy are
// whole, aligned 16-byte vectors.
template <class T, class Sum, bool kAccumulate>
__global__ void __launch_bounds__(kStreamThreads)
    ManyTokensKernel(EmbeddingShape shape, const T* __restrict__ dy_TH, TokenGroups groups,
                     Sum* __restrict__ sum) {
  constexpr int kTileRows = kTileBytes / (kSliceColumns * static_cast<int>(sizeof(T)));
  constexpr int kVectors = kSliceColumns / kWholeVector<T>;  // In a row of the slice.
  constexpr int kPasses = kTileRows * kVectors / kStreamThreads;
  __shared__ alignas(16) T tiles[kStages][kTileRows][kSliceColumns];
  const int thread = threadIdx.x;
  const int load_row = thread / kVectors;
  const int load_column = thread % kVectors * kWholeVector<T>;
  const int64_t slice = static_cast<int64_t>(blockIdx.y) * kSliceColumns;
  const bool loads = slice + load_column < shape.hidden_size;
  const bool adds = thread < kSliceColumns && slice + thread < shape.hidden_size;
  const int row_count = *groups.count;
  const int frequent_count = *groups.frequent_count;

  for (int at = blockIdx.x; at < frequent_count; at += gridDim.x) {
    const int row = groups.frequent[at];
    const int first = groups.first_U[row];
    const int length = RowEnd(groups, row, row_count, static_cast<int>(shape.token_count)) - first;
    const int tile_count = (length + kTileRows - 1) / kTileRows;
    const int64_t target_row = kAccumulate ? groups.row_U[row] : row;
    Sum* target = sum + target_row * shape.hidden_size + slice + thread;
    float total = kAccumulate && adds ? ToFloat(*target) : 0.0f;

    // Positions are read one tile ahead of the rows they point to.
    int32_t position[kPasses];
    const auto read_positions = [&](int tile) {
#pragma unroll
      for (int p = 0; p < kPasses; ++p) {
        const int i = tile * kTileRows + p * (kStreamThreads / kVectors) + load_row;
        position[p] = groups.position_T[first + min(i, length - 1)];
      }
    };
    const auto load_tile = [&](int tile) {
      if (tile < tile_count) {
#pragma unroll
        for (int p = 0; p < kPasses; ++p) {
          const int tile_row = p * (kStreamThreads / kVectors) + load_row;
          if (loads && tile * kTileRows + tile_row < length) {
            __pipeline_memcpy_async(&tiles[tile % kStages][tile_row][load_column],
                                    dy_TH + position[p] * shape.hidden_size + slice + load_column,
                                    16);
          }
        }
        if (tile + 1 < tile_count) read_positions(tile + 1);
      }
      __pipeline_commit();  // Empty at the end, so that one tile is always one group.
    };

    read_positions(0);
    for (int tile = 0; tile < kStages - 1; ++tile) load_tile(tile);
    for (int tile = 0; tile < tile_count; ++tile) {
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();  // The tile is there, and everyone has done with the one before it.
      load_tile(tile + kStages - 1);
      if (!adds) continue;
      const T(*rows)[kSliceColumns] = tiles[tile % kStages];
      const int count = length - tile * kTileRows;
      if (count >= kTileRows) {
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) total += ToFloat(rows[r][thread]);
      } else {
        for (int r = 0; r < count; ++r) total += ToFloat(rows[r][thread]);
      }
    }
    if (adds) *target = RoundTo<Sum>(total);
    __syncthreads();  // Before the next row's tiles overwrite the last ones.
  }
}

constexpr int64_t kScratchAlignment = 256;

int64_t AlignUp(int64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// Scratch: sorted tokens, positions before sorting, then what CUB asks for.
struct GroupScratch {
  uint32_t* token_T;
  int32_t* position_T;
  void* library;
  size_t library_bytes;
};

size_t LibraryBytes(int token_count) {
  size_t sort_bytes = 0;
  size_t unique_bytes = 0;
  const uint32_t* keys = nullptr;
  uint32_t* sorted = nullptr;
  int32_t* values = nullptr;
  OOM_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, keys, sorted, values, values,
                                            token_count) == cudaSuccess);
  OOM_CHECK(cub::DeviceSelect::UniqueByKey(nullptr, unique_bytes, sorted,
                                           thrust::counting_iterator<int32_t>(0), values, values,
                                           values, token_count) == cudaSuccess);
  return std::max(sort_bytes, unique_bytes);
}

GroupScratch Divide(void* scratch, int token_count) {
  char* bytes = static_cast<char*>(scratch);
  const int64_t list_bytes = AlignUp(token_count * static_cast<int64_t>(sizeof(int32_t)));
  return {.token_T = reinterpret_cast<uint32_t*>(bytes),
          .position_T = reinterpret_cast<int32_t*>(bytes + list_bytes),
          .library = bytes + 2 * list_bytes,
          .library_bytes = LibraryBytes(token_count)};
}

template <class T, class Sum, bool kAccumulate>
void Backward(const EmbeddingShape& shape, const T* dy_TH, const TokenGroups& groups, Sum* sum,
              cudaStream_t stream) {
  OOM_CHECK(shape.token_count >= 0 && shape.token_count < INT32_MAX && shape.hidden_size > 0);
  if (shape.token_count == 0) return;
  const bool whole =
      WholeVectors(shape.hidden_size * static_cast<int64_t>(sizeof(T)), dy_TH, sum) &&
      shape.hidden_size * static_cast<int64_t>(sizeof(Sum)) % 16 == 0;
  const int vector = whole ? kWholeVector<T> : 1;
  const int64_t columns = (shape.hidden_size + vector - 1) / vector;
  const int64_t threads = std::min<int64_t>(kThreads, (columns + 31) / 32 * 32);
  const dim3 blocks(static_cast<unsigned>(std::min(shape.token_count, kRowBlocks)),
                    static_cast<unsigned>((columns + threads - 1) / threads));
  const unsigned block_threads = static_cast<unsigned>(threads);
  if (!whole) {
    FewTokensKernel<T, Sum, kAccumulate, 1>
        <<<blocks, block_threads, 0, stream>>>(shape, dy_TH, groups, INT32_MAX, sum);
  } else {
    const dim3 stream_blocks(
        static_cast<unsigned>(std::min<int64_t>(FrequentRows(shape.token_count), 128)),
        static_cast<unsigned>((shape.hidden_size + kSliceColumns - 1) / kSliceColumns));
    ManyTokensKernel<T, Sum, kAccumulate>
        <<<stream_blocks, kStreamThreads, 0, stream>>>(shape, dy_TH, groups, sum);
    FewTokensKernel<T, Sum, kAccumulate, kWholeVector<T>>
        <<<blocks, block_threads, 0, stream>>>(shape, dy_TH, groups, kFewTokens, sum);
  }
  CheckLaunch("EmbeddingBackward");
}

}  // namespace

int64_t FrequentRows(int64_t token_count) { return token_count / (kFewTokens + 1) + 1; }

int64_t GroupTokensScratchBytes(int64_t token_count) {
  OOM_CHECK(token_count >= 0 && token_count < INT32_MAX);
  if (token_count == 0) return 0;
  return 2 * AlignUp(token_count * static_cast<int64_t>(sizeof(int32_t))) +
         static_cast<int64_t>(LibraryBytes(static_cast<int>(token_count)));
}

void GroupTokens(const int32_t* token_T, int64_t token_count, int64_t vocabulary_size,
                 const TokenGroups& groups, void* scratch, cudaStream_t stream) {
  OOM_CHECK(token_count >= 0 && token_count < INT32_MAX);
  OOM_CHECK(vocabulary_size > 0 && vocabulary_size <= INT32_MAX);
  // CheckLaunch sees its result too.
  static_cast<void>(cudaMemsetAsync(groups.frequent_count, 0, sizeof(int32_t), stream));
  if (token_count == 0) {
    static_cast<void>(cudaMemsetAsync(groups.count, 0, sizeof(int32_t), stream));
    CheckLaunch("GroupTokens");
    return;
  }
  const int count = static_cast<int>(token_count);
  const unsigned blocks = static_cast<unsigned>((token_count + kThreads - 1) / kThreads);
  GroupScratch parts = Divide(scratch, count);
  CountUpKernel<<<blocks, kThreads, 0, stream>>>(count, parts.position_T);
  // Tokens are not negative, so they sort as unsigned numbers of as many bits as the vocabulary
  // has.
  const int bits =
      std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(vocabulary_size - 1))));
  OOM_CHECK(cub::DeviceRadixSort::SortPairs(parts.library, parts.library_bytes,
                                            reinterpret_cast<const uint32_t*>(token_T),
                                            parts.token_T, parts.position_T, groups.position_T,
                                            count, 0, bits, stream) == cudaSuccess);
  OOM_CHECK(cub::DeviceSelect::UniqueByKey(parts.library, parts.library_bytes, parts.token_T,
                                           thrust::counting_iterator<int32_t>(0), groups.row_U,
                                           groups.first_U, groups.count, count,
                                           stream) == cudaSuccess);
  IndexKernel<<<blocks, kThreads, 0, stream>>>(groups, count);
  CheckLaunch("GroupTokens");
}

void EmbeddingForward(const __nv_bfloat16* weight_VH, const int32_t* index_T, int64_t token_count,
                      int64_t hidden_size, __nv_bfloat16* y_TH, cudaStream_t stream) {
  GatherRows({.index_R = index_T, .row_count = token_count, .hidden_size = hidden_size}, weight_VH,
             y_TH, stream);
}

void EmbeddingForward(const float* weight_VH, const int32_t* index_T, int64_t token_count,
                      int64_t hidden_size, float* y_TH, cudaStream_t stream) {
  GatherRows({.index_R = index_T, .row_count = token_count, .hidden_size = hidden_size}, weight_VH,
             y_TH, stream);
}

void EmbeddingBackwardByRow(const EmbeddingShape& shape, const __nv_bfloat16* dy_TH,
                            const TokenGroups& groups, float* sum_UH, cudaStream_t stream) {
  Backward<__nv_bfloat16, float, false>(shape, dy_TH, groups, sum_UH, stream);
}

void EmbeddingBackwardByRow(const EmbeddingShape& shape, const __nv_bfloat16* dy_TH,
                            const TokenGroups& groups, __nv_bfloat16* sum_UH, cudaStream_t stream) {
  Backward<__nv_bfloat16, __nv_bfloat16, false>(shape, dy_TH, groups, sum_UH, stream);
}

void EmbeddingBackwardByRow(const EmbeddingShape& shape, const float* dy_TH,
                            const TokenGroups& groups, float* sum_UH, cudaStream_t stream) {
  Backward<float, float, false>(shape, dy_TH, groups, sum_UH, stream);
}

void EmbeddingBackward(const EmbeddingShape& shape, const __nv_bfloat16* dy_TH,
                       const TokenGroups& groups, float* dweight_VH, cudaStream_t stream) {
  Backward<__nv_bfloat16, float, true>(shape, dy_TH, groups, dweight_VH, stream);
}

void EmbeddingBackward(const EmbeddingShape& shape, const float* dy_TH, const TokenGroups& groups,
                       float* dweight_VH, cudaStream_t stream) {
  Backward<float, float, true>(shape, dy_TH, groups, dweight_VH, stream);
}

}  // namespace oom
