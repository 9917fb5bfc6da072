#include <cmath>

#include "runtime/kernels/cross_entropy.h"
#include "runtime/kernels/exponential.cuh"
#include "runtime/kernels/exponential_sum.cuh"
#include "runtime/kernels/launch.h"
#include "runtime/kernels/logit_cap.cuh"
#include "runtime/kernels/packed.cuh"

namespace oom {
namespace {

using internal::ArriveAtCluster;
using internal::BaseOf;
using internal::DivideUp;
using internal::ExpBelow;
using internal::Exponentials;
using internal::Finite;
using internal::JoinBlock;
using internal::JoinLanes;
using internal::kPackedCount;
using internal::Load;
using internal::Logit;
using internal::LogitCap;
using internal::LogitOf;
using internal::LogSumMinus;
using internal::Maximum;
using internal::NoExponentials;
using internal::Pack;
using internal::Packed;
using internal::ReadFromCluster;
using internal::Rebase;
using internal::RoundedTo;
using internal::Store;
using internal::WaitForCluster;
using internal::WholeVectors;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxClusterBlocks = 8;
constexpr int kMaxVectors = 32;          // Of a thread: 128 registers.
constexpr int kPreferredVectors = 16;    // Of a thread, as long as a larger cluster can see to it.
constexpr int kFourBlocksVectors = 10;   // Up to here four blocks fit a multiprocessor,
constexpr int kThreeBlocksVectors = 16;  // and up to here three.

template <class T>
struct Arguments {
  int64_t vocabulary;
  T* logits_TV;
  const int64_t* target_T;
  float scale;
  float* loss_T;
  bool want_gradient;
  LogitCap cap;
};

constexpr int BlocksOfMultiprocessor(int vectors) {
  return vectors <= kFourBlocksVectors ? 4 : vectors <= kThreeBlocksVectors ? 3 : 1;
}

// One row a cluster of `blocks`, each holding a contiguous range of it in registers.
template <class T, int kVectors, bool kCapped>
__global__ void __launch_bounds__(kThreads, BlocksOfMultiprocessor(kVectors))
    KeptRowKernel(Arguments<T> a, int blocks) {
  constexpr int kCount = kPackedCount<T>;
  __shared__ Exponentials by_warp[kWarps];
  __shared__ alignas(8) Exponentials of_block;
  const int64_t token = blockIdx.x / blocks;
  const int rank = static_cast<int>(blockIdx.x % blocks);
  const int lane = threadIdx.x % 32;
  const int row_vectors = static_cast<int>(a.vocabulary / kCount);
  const int block_vectors = (row_vectors + blocks - 1) / blocks;
  const int first = rank * block_vectors + static_cast<int>(threadIdx.x);
  const int end = min(row_vectors, (rank + 1) * block_vectors);
  T* const row = a.logits_TV + token * a.vocabulary;
  // Before it is known whether the row has a target: a row's way from memory is most of the time of
  // its blocks.
  Packed<T> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int vector = first + k * kThreads;
    x[k] = Load<true, kCount>(row + int64_t{vector} * kCount, end - vector);
  }

  const int64_t target = a.target_T[token];
  if (target < 0) {
    if (rank == 0 && threadIdx.x == 0) a.loss_T[token] = 0.0f;
    if (!a.want_gradient) return;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int vector = first + k * kThreads;
      Store<true>(row + int64_t{vector} * kCount, Packed<T>{}, end - vector);
    }
    return;
  }

  // One thread of the cluster has the target among its values; it reads it before any is
  // overwritten.
  const int target_vector = static_cast<int>(target / kCount);
  const bool owns_target =
      target_vector >= first && target_vector < end && (target_vector - first) % kThreads == 0;
  const Logit target_logit =
      LogitOf<T, kCapped>(owns_target ? static_cast<float>(row[target]) : 0.0f, a.cap);

  Exponentials all = NoExponentials();
  if (first < end) {
    Packed<T> maxima = x[0];
#pragma unroll
    for (int k = 1; k < kVectors; ++k) {
      if (first + k * kThreads < end) maxima = Maximum(maxima, x[k]);
    }
    float maximum = maxima[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) maximum = fmaxf(maximum, maxima[i]);
    all.base = BaseOf<T>(LogitOf<T, kCapped>(maximum, a.cap).value);
  }
  const float own_base = Finite(all.base);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (first + k * kThreads >= end) continue;
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      part += ExpBelow<T>(LogitOf<T, kCapped>(x[k][i], a.cap).value, own_base);
    }
    all.sum += part;
  }

  all = JoinBlock<T>(all, by_warp);
  if (threadIdx.x == 0) of_block = all;
  if (blocks == 1) {
    __syncthreads();
    all = of_block;
  } else {
    ArriveAtCluster();
    WaitForCluster();
    all = JoinLanes<T>(lane < blocks ? ReadFromCluster(&of_block, lane) : NoExponentials());
    ArriveAtCluster();  // No block may end before the others have read its sum: see below.
  }

  if (owns_target) a.loss_T[token] = LogSumMinus<T>(all.sum, all.base, target_logit.value);
  if (a.want_gradient) {
    const float base = Finite(all.base);
    const float factor = a.scale / all.sum;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int vector = first + k * kThreads;
      if (vector >= end) continue;
      float gradient[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Logit logit = LogitOf<T, kCapped>(x[k][i], a.cap);
        gradient[i] = ExpBelow<T>(logit.value, base) * factor * logit.slope;
      }
      Store<true>(row + int64_t{vector} * kCount, Pack<T>(gradient), end - vector);
    }
    if (owns_target) {
      const float gradient = ExpBelow<T>(target_logit.value, base) * factor - a.scale;
      row[target] = RoundedTo<T>(gradient * target_logit.slope);
    }
  }
  if (blocks > 1) WaitForCluster();
}

// One row a block, read twice.
constexpr int kReadTwiceThreads = 512;

template <class T, bool kWhole, bool kCapped>
__global__ void __launch_bounds__(kReadTwiceThreads) ReadTwiceKernel(Arguments<T> a) {
  constexpr int kCount = kPackedCount<T>;
  constexpr int64_t kStep = kReadTwiceThreads * kCount;
  __shared__ Exponentials by_warp[kReadTwiceThreads / 32];
  __shared__ Exponentials of_row;
  const int64_t token = blockIdx.x;
  const int64_t own = threadIdx.x * kCount;
  T* const row = a.logits_TV + token * a.vocabulary;
  const int64_t target = a.target_T[token];
  if (target < 0) {
    if (threadIdx.x == 0) a.loss_T[token] = 0.0f;
    if (!a.want_gradient) return;
    for (int64_t column = own; column < a.vocabulary; column += kStep) {
      Store<kWhole>(row + column, Packed<T>{}, a.vocabulary - column);
    }
    return;
  }

  Exponentials all = NoExponentials();
  for (int64_t column = own; column < a.vocabulary; column += kStep) {
    const int64_t left = a.vocabulary - column;
    const Packed<T> x = Load<kWhole, kCount>(row + column, left);
    float maximum = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) maximum = fmaxf(maximum, x[i]);
    }
    const float base = fmaxf(all.base, BaseOf<T>(LogitOf<T, kCapped>(maximum, a.cap).value));
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) part += ExpBelow<T>(LogitOf<T, kCapped>(x[i], a.cap).value, Finite(base));
    }
    all.sum = all.sum * Rebase<T>(all.base, Finite(base)) + part;
    all.base = base;
  }
  all = JoinBlock<T>(all, by_warp);
  if (threadIdx.x == 0) {
    of_row = all;
    const Logit logit = LogitOf<T, kCapped>(static_cast<float>(row[target]), a.cap);
    a.loss_T[token] = LogSumMinus<T>(all.sum, all.base, logit.value);
  }
  __syncthreads();
  if (!a.want_gradient) return;
  all = of_row;
  const float base = Finite(all.base);
  const float factor = a.scale / all.sum;
  // Backwards: what was read last is in the cache still.
  for (int64_t step = DivideUp(a.vocabulary, kStep) - 1; step >= 0; --step) {
    const int64_t column = step * kStep + own;
    const int64_t left = a.vocabulary - column;
    const Packed<T> x = Load<kWhole, kCount>(row + column, left);
    float gradient[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Logit logit = LogitOf<T, kCapped>(x[i], a.cap);
      gradient[i] = ExpBelow<T>(logit.value, base) * factor;
      if (column + i == target) gradient[i] -= a.scale;
      gradient[i] *= logit.slope;
    }
    Store<kWhole>(row + column, Pack<T>(gradient), left);
  }
}

constexpr int kSumThreads = 1024;

__global__ void __launch_bounds__(kSumThreads)
    SumLossesKernel(int64_t tokens, const float* loss_T, const int64_t* target_T, double* loss_sum,
                    int64_t* valid_targets) {
  __shared__ double sums[kSumThreads];
  __shared__ int64_t counts[kSumThreads];
  double sum = 0.0;
  int64_t count = 0;
#pragma unroll 8
  for (int64_t token = threadIdx.x; token < tokens; token += kSumThreads) {
    sum += static_cast<double>(loss_T[token]);
    count += target_T[token] >= 0 ? 1 : 0;
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  for (unsigned half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
      counts[threadIdx.x] += counts[threadIdx.x + half];
    }
  }
  if (threadIdx.x != 0) return;
  *loss_sum += sums[0];
  *valid_targets += counts[0];
}

bool DeviceHasClusters() {
  int device = 0, major = 0;
  OOM_CHECK(cudaGetDevice(&device) == cudaSuccess);
  OOM_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
            cudaSuccess);
  return major >= 9;
}

template <class T, int kVectors, bool kCapped>
void LaunchKept(const Arguments<T>& a, int64_t tokens, int blocks, cudaStream_t stream) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tokens * blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  // Its result is the launch's, which CheckLaunch sees too.
  static_cast<void>(cudaLaunchKernelEx(&config, KeptRowKernel<T, kVectors, kCapped>, a, blocks));
}

// The least of kVectors... that is at least `vectors`. REQUIRES: the last one is.
template <class T, bool kCapped, int kVectors, int... kMore>
void LaunchFor(int64_t vectors, const Arguments<T>& a, int64_t tokens, int blocks,
               cudaStream_t stream) {
  if constexpr (sizeof...(kMore) > 0) {
    if (vectors > kVectors) {
      return LaunchFor<T, kCapped, kMore...>(vectors, a, tokens, blocks, stream);
    }
  }
  LaunchKept<T, kVectors, kCapped>(a, tokens, blocks, stream);
}

template <bool kCapped, class T>
void Launch(const Arguments<T>& a, int64_t tokens, cudaStream_t stream) {
  const bool whole = WholeVectors(a.vocabulary * sizeof(T), a.logits_TV);
  const int64_t row_vectors = a.vocabulary / kPackedCount<T>;
  const int max_blocks = whole && DeviceHasClusters() ? kMaxClusterBlocks : 1;
  int blocks = 1;
  while (blocks < max_blocks && row_vectors > blocks * kThreads * kPreferredVectors) blocks *= 2;
  const int64_t vectors = DivideUp(DivideUp(row_vectors, blocks), kThreads);
  const auto rows = static_cast<unsigned>(tokens);
  if (!whole) {
    ReadTwiceKernel<T, false, kCapped><<<rows, kReadTwiceThreads, 0, stream>>>(a);
  } else if (vectors > kMaxVectors) {
    ReadTwiceKernel<T, true, kCapped><<<rows, kReadTwiceThreads, 0, stream>>>(a);
  } else {
    LaunchFor<T, kCapped, 2, 4, 6, 8, 10, 16, 20, kMaxVectors>(vectors, a, tokens, blocks, stream);
  }
  CheckLaunch("CrossEntropy");
}

template <class T>
void CrossEntropy(const CrossEntropyShape& shape, T* logits_TV, const int64_t* target_T,
                  float scale, float* loss_T, bool want_gradient, cudaStream_t stream) {
  OOM_CHECK(shape.tokens >= 0 && shape.vocabulary > 0 && shape.logit_cap >= 0.0f);
  if (shape.tokens == 0) return;
  const Arguments<T> a{.vocabulary = shape.vocabulary,
                       .logits_TV = logits_TV,
                       .target_T = target_T,
                       .scale = scale,
                       .loss_T = loss_T,
                       .want_gradient = want_gradient,
                       .cap = LogitCap(shape.logit_cap)};
  if (shape.logit_cap == 0.0f) {
    Launch<false>(a, shape.tokens, stream);
  } else {
    Launch<true>(a, shape.tokens, stream);
  }
}

// The same kernels, which then write nothing to the logits.
template <class T>
void LossOnly(const CrossEntropyShape& shape, const T* logits_TV, const int64_t* target_T,
              float* loss_T, cudaStream_t stream) {
  CrossEntropy(shape, const_cast<T*>(logits_TV), target_T, 0.0f, loss_T, false, stream);
}

}  // namespace

void CrossEntropyInPlace(const CrossEntropyShape& shape, __nv_bfloat16* logits_TV,
                         const int64_t* target_T, float scale, float* loss_T, cudaStream_t stream) {
  CrossEntropy(shape, logits_TV, target_T, scale, loss_T, true, stream);
}
void CrossEntropyInPlace(const CrossEntropyShape& shape, float* logits_TV, const int64_t* target_T,
                         float scale, float* loss_T, cudaStream_t stream) {
  CrossEntropy(shape, logits_TV, target_T, scale, loss_T, true, stream);
}

void CrossEntropyLoss(const CrossEntropyShape& shape, const __nv_bfloat16* logits_TV,
                      const int64_t* target_T, float* loss_T, cudaStream_t stream) {
  LossOnly(shape, logits_TV, target_T, loss_T, stream);
}
void CrossEntropyLoss(const CrossEntropyShape& shape, const float* logits_TV,
                      const int64_t* target_T, float* loss_T, cudaStream_t stream) {
  LossOnly(shape, logits_TV, target_T, loss_T, stream);
}

void SumLosses(int64_t tokens, const float* loss_T, const int64_t* target_T, double* loss_sum,
               int64_t* valid_targets, cudaStream_t stream) {
  OOM_CHECK(tokens >= 0);
  if (tokens == 0) return;
  SumLossesKernel<<<1, kSumThreads, 0, stream>>>(tokens, loss_T, target_T, loss_sum, valid_targets);
  CheckLaunch("SumLosses");
}

}  // namespace oom
