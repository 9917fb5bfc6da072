// Time as the daemon's core sees it: passed in, so that tests and simulations never sleep.
// Implementations are thread-safe.

#pragma once

#include <time.h>

namespace oom {

class Clock {
 public:
  virtual ~Clock() = default;
  // For what people read: create_time, retention.
  virtual double UnixSeconds() const = 0;
  // For every timer: unmoved by a change of the wall clock.
  virtual double MonotonicSeconds() const = 0;
};

class SystemClock : public Clock {
 public:
  double UnixSeconds() const override { return Read(CLOCK_REALTIME); }
  double MonotonicSeconds() const override { return Read(CLOCK_MONOTONIC); }

 private:
  static double Read(clockid_t id) {
    timespec now = {};
    clock_gettime(id, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  }
};

}  // namespace oom
