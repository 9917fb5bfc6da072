// TransferCounts counts the bytes that one rank has moved, by resource and unit; they equal the plan's account
// exactly (engine rules, section 13). Add is called by the resources' stream threads, the rest by anyone.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime/graph/step_graph.h"

namespace oom {

class TransferCounts {
 public:
  explicit TransferCounts(int64_t unit_count)
      : unit_count_(unit_count),
        bytes_(static_cast<size_t>(kResourceCount * unit_count)) {}

  void Add(Resource resource, int64_t unit, int64_t bytes) {
    bytes_[Index(resource, unit)].fetch_add(bytes, std::memory_order_relaxed);
  }

  int64_t unit_count() const { return unit_count_; }
  int64_t bytes(Resource resource, int64_t unit) const {
    return bytes_[Index(resource, unit)].load(std::memory_order_relaxed);
  }
  // Of all units.
  int64_t bytes(Resource resource) const {
    int64_t sum = 0;
    for (int64_t unit = 0; unit < unit_count_; ++unit) sum += bytes(resource, unit);
    return sum;
  }

 private:
  size_t Index(Resource resource, int64_t unit) const {
    return static_cast<size_t>(static_cast<int64_t>(resource) * unit_count_ + unit);
  }

  const int64_t unit_count_;
  std::vector<std::atomic<int64_t>> bytes_;
};

}  // namespace oom
