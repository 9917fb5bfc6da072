// Neighbouring activations in registers, kept packed as they lie in memory and widened where they
// are used: a row of 4,096 BF16 values is 64 registers of each lane of a warp. Also the sums of
// lanes and blocks that the row kernels share; each has one order. Device code, internal to this
// folder.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace oom::internal {

// Elements of T in 16 bytes.
template <class T>
inline constexpr int kPackedCount = 16 / static_cast<int>(sizeof(T));

template <class T, int kCount = kPackedCount<T>>
struct Packed {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords % 2 == 0);
  uint32_t words[kWords];

  // The i-th value, widened. After unrolling `i` must be a constant.
  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
    }
  }
};

// From here on the compiler widens again, rather than keep widened values from before in registers.
template <class T, int kCount>
__device__ void Forget(Packed<T, kCount>* packed) {
#pragma unroll
  for (int word = 0; word < packed->kWords; ++word) asm volatile("" : "+r"(packed->words[word]));
}

// operation(x, y) on pairs of BF16 values or on FP32 values.
template <class T, int kCount, class Operation>
__device__ Packed<T, kCount> Wordwise(const Packed<T, kCount>& a, const Packed<T, kCount>& b,
                                      const Operation& operation) {
  Packed<T, kCount> result;
#pragma unroll
  for (int word = 0; word < result.kWords; ++word) {
    if constexpr (sizeof(T) == 4) {
      result.words[word] = __float_as_uint(
          operation(__uint_as_float(a.words[word]), __uint_as_float(b.words[word])));
    } else {
      const __nv_bfloat162 pair =
          operation(*reinterpret_cast<const __nv_bfloat162*>(&a.words[word]),
                    *reinterpret_cast<const __nv_bfloat162*>(&b.words[word]));
      result.words[word] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return result;
}

template <class T>
__device__ T RoundedTo(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    return __float2bfloat16_rn(value);
  }
}

// `values` rounded to T.
template <class T, int kCount>
__device__ Packed<T, kCount> Pack(const float (&values)[kCount]) {
  Packed<T, kCount> packed;
#pragma unroll
  for (int word = 0; word < packed.kWords; ++word) {
    if constexpr (sizeof(T) == 4) {
      packed.words[word] = __float_as_uint(values[word]);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * word], values[2 * word + 1]);
      packed.words[word] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return packed;
}

// Elementwise, each result rounded once to T, never contracted to an FMA. For BF16 that is also
// what an FP32 operation rounded to BF16 gives: a product of two is exact in FP32, and so is a sum
// that comes near a tie of the second rounding.
template <class T, int kCount>
__device__ Packed<T, kCount> Product(const Packed<T, kCount>& a, const Packed<T, kCount>& b) {
  return Wordwise(a, b, [](auto x, auto y) {
    if constexpr (sizeof(T) == 4) {
      return __fmul_rn(x, y);
    } else {
      return __hmul2_rn(x, y);
    }
  });
}
template <class T, int kCount>
__device__ Packed<T, kCount> Sum(const Packed<T, kCount>& a, const Packed<T, kCount>& b) {
  return Wordwise(a, b, [](auto x, auto y) {
    if constexpr (sizeof(T) == 4) {
      return __fadd_rn(x, y);
    } else {
      return __hadd2_rn(x, y);
    }
  });
}
template <class T, int kCount>
__device__ Packed<T, kCount> Difference(const Packed<T, kCount>& a, const Packed<T, kCount>& b) {
  return Wordwise(a, b, [](auto x, auto y) {
    if constexpr (sizeof(T) == 4) {
      return __fsub_rn(x, y);
    } else {
      return __hsub2_rn(x, y);
    }
  });
}

// Where only one value is a NaN, the other one.
template <class T, int kCount>
__device__ Packed<T, kCount> Maximum(const Packed<T, kCount>& a, const Packed<T, kCount>& b) {
  return Wordwise(a, b, [](auto x, auto y) {
    if constexpr (sizeof(T) == 4) {
      return fmaxf(x, y);
    } else {
      return __hmax2(x, y);
    }
  });
}

// The values at `from`, of which `left` exist; zeros behind them. kWhole: all or none exist and
// `from` is aligned to the vector (16 bytes at most); otherwise they are read one by one.
template <bool kWhole, int kCount, class T>
__device__ Packed<T, kCount> Load(const T* from, int64_t left) {
  Packed<T, kCount> packed = {};
  if constexpr (kWhole) {
    if (left <= 0) return packed;
    if constexpr (packed.kWords == 2) {
      const uint2 raw = *reinterpret_cast<const uint2*>(from);
      packed.words[0] = raw.x;
      packed.words[1] = raw.y;
    } else {
#pragma unroll
      for (int word = 0; word < packed.kWords; word += 4) {
        const uint4 raw = reinterpret_cast<const uint4*>(from)[word / 4];
        packed.words[word] = raw.x;
        packed.words[word + 1] = raw.y;
        packed.words[word + 2] = raw.z;
        packed.words[word + 3] = raw.w;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= left) continue;
      if constexpr (sizeof(T) == 4) {
        packed.words[i] = reinterpret_cast<const uint32_t*>(from)[i];
      } else {
        packed.words[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(from)[i])
                               << (i % 2 * 16);
      }
    }
  }
  return packed;
}

template <bool kWhole, int kCount, class T>
__device__ void Store(T* to, const Packed<T, kCount>& packed, int64_t left) {
  if constexpr (kWhole) {
    if (left <= 0) return;
    if constexpr (packed.kWords == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(packed.words[0], packed.words[1]);
    } else {
#pragma unroll
      for (int word = 0; word < packed.kWords; word += 4) {
        reinterpret_cast<uint4*>(to)[word / 4] =
            make_uint4(packed.words[word], packed.words[word + 1], packed.words[word + 2],
                       packed.words[word + 3]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= left) continue;
      if constexpr (sizeof(T) == 4) {
        reinterpret_cast<uint32_t*>(to)[i] = packed.words[i];
      } else {
        reinterpret_cast<uint16_t*>(to)[i] =
            static_cast<uint16_t>(packed.words[i / 2] >> (i % 2 * 16));
      }
    }
  }
}

// Over kLanes neighbouring lanes; each gets the same bits. All lanes of the warp must call it.
template <int kLanes>
__device__ float SumOverLanes(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
  }
  return x;
}

// Over a block of whole warps; every thread gets the same bits. Two calls in a row need two
// buffers: a warp may still read the first when another is behind the second call's barrier.
template <int kValues>
__device__ void SumOverBlock(float (&x)[kValues], float (*buffer)[kValues]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    x[i] = SumOverLanes<32>(x[i]);
    if (lane == 0) buffer[warp][i] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    x[i] = SumOverLanes<32>(lane < blockDim.x / 32 ? buffer[lane][i] : 0.0f);
  }
}

constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether rows of `row_bytes` bytes (0: one row) that start there are made of aligned vectors.
template <class... Pointer>
bool WholeVectors(int64_t row_bytes, const Pointer*... pointers) {
  return row_bytes % 16 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace oom::internal
