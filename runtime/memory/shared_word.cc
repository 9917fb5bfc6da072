#include "runtime/memory/shared_word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <thread>

namespace oom {
namespace {

void FutexWake(uint32_t* address) {
  ::syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void FutexWait(const uint32_t* address, uint32_t expected, std::chrono::nanoseconds timeout) {
  struct timespec limit {};
  limit.tv_sec = timeout.count() / 1000000000;
  limit.tv_nsec = timeout.count() % 1000000000;
  ::syscall(SYS_futex, address, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

}  // namespace

int SpinMicrosecondsFor(int thread_count) {
  return thread_count <= static_cast<int>(std::thread::hardware_concurrency()) ? 20 : 0;
}

uint32_t* SharedWord::futex() const {
  return reinterpret_cast<uint32_t*>(const_cast<std::atomic<uint64_t>*>(&value_));
}

void SharedWord::Publish(uint64_t value) {
  value_.store(value, std::memory_order_release);
  FutexWake(futex());
}

void SharedWord::RaiseTo(uint64_t value) {
  uint64_t seen = value_.load(std::memory_order_relaxed);
  while (seen < value &&
         !value_.compare_exchange_weak(seen, value, std::memory_order_acq_rel)) {
  }
  FutexWake(futex());
}

void SharedWord::Ring() {
  value_.fetch_add(1, std::memory_order_acq_rel);
  FutexWake(futex());
}

void SharedWord::WakeAll() { FutexWake(futex()); }

WaitResult SharedWord::WaitAtLeast(uint64_t target, const SharedWord& aborted,
                                   const WaitOptions& options) const {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const Clock::time_point spin_end = start + std::chrono::microseconds(options.spin_microseconds);
  while (true) {
    const uint64_t seen = Load();
    // Looked at after the word: an abort is stored before any word is released by it.
    if (aborted.Load() != 0) return WaitResult::kAborted;
    if (seen >= target) return WaitResult::kReached;
    const Clock::time_point now = Clock::now();
    if (now - start >= options.timeout) return WaitResult::kTimeout;
    if (now < spin_end) continue;
    const std::chrono::nanoseconds left = options.timeout - (now - start);
    FutexWait(futex(), static_cast<uint32_t>(seen),
              std::min<std::chrono::nanoseconds>(left, options.sleep_slice));
  }
}

}  // namespace oom
