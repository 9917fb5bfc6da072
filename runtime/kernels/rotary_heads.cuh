// Heads in the registers of a few lanes, as rotation wants them: each lane holds pairs that turn
// against each other. Arithmetic and roundings as rotary.h has them. Device code, internal to this
// folder.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "runtime/kernels/packed.cuh"
#include "runtime/kernels/rotary.h"

namespace oom::internal {

inline constexpr int kHeadThreads = 256;  // Of a block.

// How the lanes of a head hold it.
enum class Layout {
  kFull,      // Vectors; all of the head is rotary.
  kPartial,   // Vectors; elements behind the rotary ones stay.
  kElements,  // Element by element; either.
};

// What all lanes of a head agree on: kLanes lanes hold a head, each kPackedCount pairs of it, so
// that no element has to travel. The first columns are the rotary pairs; the elements behind these
// make pairs of two halves likewise, which stay. A block walks the heads of its tokens, as many at
// once as it has groups.
template <class T, int kLanes, Layout kLayout>
struct HeadPlace {
  static constexpr int kCount = kPackedCount<T>;
  static constexpr int kGroups = kHeadThreads / kLanes;

  __device__ HeadPlace(const RotaryShape& shape, int64_t tokens_per_block)
      : first_token(blockIdx.x * tokens_per_block),
        items(
            static_cast<unsigned>(min(tokens_per_block, shape.tokens - first_token) * shape.heads)),
        heads(static_cast<unsigned>(shape.heads)),
        half(static_cast<int>(shape.head_size / 2)),
        pairs(kLayout == Layout::kFull ? half : static_cast<int>(shape.rotary_size / 2)),
        column(threadIdx.x % kLanes * kCount),
        first(First(column)),
        second(first + Gap(column)),
        group(threadIdx.x / kLanes) {}

  __device__ bool Turns(int of_column) const {
    return kLayout == Layout::kFull || of_column < pairs;
  }
  // Where the elements of a column lie in the head.
  __device__ int First(int of_column) const {
    return Turns(of_column) ? of_column : of_column + pairs;
  }
  __device__ int Gap(int of_column) const { return Turns(of_column) ? pairs : half - pairs; }

  int64_t first_token;
  unsigned items;  // Heads of all the block's tokens.
  unsigned heads;
  int half;
  int pairs;  // That turn.
  int column;
  int first;  // Of the column.
  int second;
  unsigned group;
};

template <class T>
struct Pairs {
  Packed<T> first, second;
};

template <class T>
__device__ float Widened(T value) {
  return static_cast<float>(value);
}

template <class T, int kLanes, Layout kLayout>
__device__ Pairs<T> LoadPairs(const HeadPlace<T, kLanes, kLayout>& place, const T* head,
                              bool live = true) {
  constexpr int kCount = kPackedCount<T>;
  if constexpr (kLayout != Layout::kElements) {
    const int left = live ? place.half - place.column : 0;
    return {.first = Load<true, kCount>(head + place.first, left),
            .second = Load<true, kCount>(head + place.second, left)};
  } else {
    float first[kCount] = {}, second[kCount] = {};
    for (int i = 0; i < kCount; ++i) {
      const int column = place.column + i;
      if (!live || column >= place.half) continue;
      const int at = place.First(column);
      first[i] = Widened(head[at]);
      second[i] = Widened(head[at + place.Gap(column)]);
    }
    return {.first = Pack<T>(first), .second = Pack<T>(second)};
  }
}

template <class T, int kLanes, Layout kLayout>
__device__ void StorePairs(const HeadPlace<T, kLanes, kLayout>& place, const Pairs<T>& y, T* head,
                           bool live) {
  if constexpr (kLayout != Layout::kElements) {
    const int left = live ? place.half - place.column : 0;
    Store<true>(head + place.first, y.first, left);
    Store<true>(head + place.second, y.second, left);
  } else {
#pragma unroll
    for (int i = 0; i < kPackedCount<T>; ++i) {
      const int column = place.column + i;
      if (!live || column >= place.half) continue;
      const int at = place.First(column);
      head[at] = RoundedTo<T>(y.first[i]);
      head[at + place.Gap(column)] = RoundedTo<T>(y.second[i]);
    }
  }
}

// A row of cosines or sines; zeros where nothing turns.
template <class T, int kLanes, Layout kLayout>
__device__ Packed<T> LoadTable(const HeadPlace<T, kLanes, kLayout>& place, const T* table_TP,
                               int64_t token, bool live) {
  return Load<kLayout != Layout::kElements, kPackedCount<T>>(
      table_TP + token * place.pairs + place.column, live ? place.pairs - place.column : 0);
}

// Every product and every sum is rounded to T.
template <class T>
__device__ Pairs<T> Turn(const Pairs<T>& n, const Packed<T>& cosine, const Packed<T>& sine) {
  return {.first = Difference(Product(n.first, cosine), Product(n.second, sine)),
          .second = Sum(Product(n.second, cosine), Product(n.first, sine))};
}
template <class T>
__device__ Pairs<T> TurnBack(const Pairs<T>& n, const Packed<T>& cosine, const Packed<T>& sine) {
  return {.first = Sum(Product(n.first, cosine), Product(n.second, sine)),
          .second = Difference(Product(n.second, cosine), Product(n.first, sine))};
}

// Turned where the columns turn, else as it is.
template <bool kBack, class T, int kLanes, Layout kLayout>
__device__ Pairs<T> Rotated(const HeadPlace<T, kLanes, kLayout>& place, const Pairs<T>& n,
                            const Packed<T>& cosine, const Packed<T>& sine) {
  const Pairs<T> turned = kBack ? TurnBack(n, cosine, sine) : Turn(n, cosine, sine);
  if constexpr (kLayout == Layout::kFull) {
    return turned;
  } else if constexpr (kLayout == Layout::kPartial) {
    return place.Turns(place.column) ? turned : n;
  } else {
    float first[kPackedCount<T>], second[kPackedCount<T>];
#pragma unroll
    for (int i = 0; i < kPackedCount<T>; ++i) {
      const bool turns = place.Turns(place.column + i);
      first[i] = turns ? turned.first[i] : n.first[i];
      second[i] = turns ? turned.second[i] : n.second[i];
    }
    return {.first = Pack<T>(first), .second = Pack<T>(second)};
  }
}

template <class T>
__device__ Packed<T> Scaled(const Packed<T>& x, float factor) {
  float values[kPackedCount<T>];
#pragma unroll
  for (int i = 0; i < kPackedCount<T>; ++i) values[i] = x[i] * factor;
  return Pack<T>(values);
}

// x * factor * (offset + weight), rounded once.
template <class T>
__device__ Packed<T> Scaled(const Packed<T>& x, float factor, float offset,
                            const Packed<T>& weight) {
  float values[kPackedCount<T>];
#pragma unroll
  for (int i = 0; i < kPackedCount<T>; ++i) values[i] = x[i] * factor * (offset + weight[i]);
  return Pack<T>(values);
}

}  // namespace oom::internal
