// SharedWord is a 64-bit monotonic counter in memory that several processes map (engine rules, section 5):
// "gradient chunk c of step t has landed", "version t of chunk c is published". It only grows. The producer
// stores with release order and wakes; the consumer waits until it is at least a target.
// A waiter spins briefly, then sleeps on a non-private futex on the low half (std::atomic::wait does not
// work across processes). Every wait ends when the page's `aborted` word is set.
// Thread-safe and process-safe. Lives in zero-filled shared memory; never constructed there.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace oom {

enum class WaitResult { kReached, kAborted, kTimeout };

struct WaitOptions {
  // 0 when threads outnumber cores: then spinning takes the producer's core away.
  int spin_microseconds = 0;
  std::chrono::nanoseconds timeout = std::chrono::hours(24);
  // A sleeper looks again at least this often: a wake may be lost with its process, and a GPU cannot wake at all.
  std::chrono::nanoseconds sleep_slice = std::chrono::milliseconds(50);
};

// Of sleep_slice where a GPU produces.
inline constexpr std::chrono::microseconds kDevicePollInterval{100};

// Spin time for a process that runs `thread_count` busy threads on this machine.
int SpinMicrosecondsFor(int thread_count);

class alignas(64) SharedWord {
 public:
  uint64_t Load() const { return value_.load(std::memory_order_acquire); }

  // Stores `value` and wakes every waiter, in all processes.
  // REQUIRES: one producer at a time; value >= the current one.
  void Publish(uint64_t value);

  // Raises the word to `value` if it is lower. Several producers may race.
  void RaiseTo(uint64_t value);

  // Adds one and wakes every waiter. Several producers may race.
  void Ring();

  // Wakes all waiters without a change, so that they look at `aborted` again.
  void WakeAll();

  // Waits until the word is at least `target`. kAborted as soon as `aborted` is not 0, even if the target
  // is reached: what an aborted step left behind must not be used.
  WaitResult WaitAtLeast(uint64_t target, const SharedWord& aborted,
                         const WaitOptions& options = {}) const;

 private:
  // Futexes are 32 bits: the low half (x86-64 and AArch64 are little-endian).
  uint32_t* futex() const;

  std::atomic<uint64_t> value_;
};

static_assert(sizeof(SharedWord) == 64, "one word a cache line");
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace oom
