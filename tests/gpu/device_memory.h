// Device memory for the length of a program: what a benchmark takes and never gives back.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "tests/gpu/cuda_check.h"

namespace oom::testing {

template <class T>
T* Allocate(int64_t elements) {
  void* memory = nullptr;
  CheckCuda(cudaMalloc(&memory, elements * sizeof(T)));
  return static_cast<T*>(memory);
}

template <class T>
T* Upload(const std::vector<T>& values) {
  T* memory = Allocate<T>(static_cast<int64_t>(values.size()));
  CheckCuda(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

}  // namespace oom::testing
