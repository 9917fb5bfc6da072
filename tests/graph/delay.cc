#include "tests/graph/delay.h"

#include <atomic>
#include <thread>

#include "tests/graph/engine_testing.h"

namespace oom::testing {

void RandomDelay(uint64_t seed, int max_microseconds) {
  static std::atomic<uint64_t> calls{0};
  const uint64_t draw = Mix(seed, calls.fetch_add(1, std::memory_order_relaxed));
  if (draw % 16 == 0) std::this_thread::yield();
  if (draw % 128 == 1) {
    std::this_thread::sleep_for(
        std::chrono::microseconds((draw >> 32) % static_cast<uint64_t>(max_microseconds)));
  }
}

void OperatorDelay(std::chrono::microseconds length) { std::this_thread::sleep_for(length); }

}  // namespace oom::testing
