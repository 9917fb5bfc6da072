// Device memory of tests and benchmarks that need no tensors. Every call waits for the device.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "tests/gpu/cuda_check.h"

namespace oom::testing {

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t size) : size_(size) {
    CheckCuda(cudaMalloc(&data_, size > 0 ? size * sizeof(T) : 1));
  }
  explicit DeviceArray(const std::vector<T>& values)
      : DeviceArray(static_cast<int64_t>(values.size())) {
    CheckCuda(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  int64_t size() const { return size_; }
  std::vector<T> ToHost() const {
    std::vector<T> values(size_);
    CheckCuda(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace oom::testing
