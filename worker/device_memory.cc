#include "worker/device_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>

namespace oom {
namespace {

std::atomic<int64_t> current_bytes{0};
std::atomic<int64_t> peak_bytes{0};
std::atomic<int64_t> recent_peak_bytes{0};  // Since the last look.

void RaiseTo(std::atomic<int64_t>* peak_bytes, int64_t now) {
  int64_t peak = peak_bytes->load(std::memory_order_relaxed);
  while (peak < now && !peak_bytes->compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void Count(int64_t bytes) {
  const int64_t now = current_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  RaiseTo(&peak_bytes, now);
  RaiseTo(&recent_peak_bytes, now);
}

void Free(void* data) {
  if (data == nullptr) return;
  Count(-static_cast<int64_t>(::malloc_usable_size(data)));
  c10::free_cpu(data);
}

class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) Count(static_cast<int64_t>(::malloc_usable_size(data)));
    return {data, data, &Free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

void InstallCountingAllocator() {
  static CountingAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, -1);
}

void CountDeviceBytes(int64_t bytes) { Count(bytes); }

int64_t DeviceBytesPeak() { return peak_bytes.load(std::memory_order_relaxed); }

MemoryUse TakeDeviceBytes() {
  const int64_t now = current_bytes.load(std::memory_order_relaxed);
  return {.bytes = now,
          .peak_bytes = std::max(now, recent_peak_bytes.exchange(now, std::memory_order_relaxed))};
}

}  // namespace oom
