// The two clocks as seconds. Any thread.

#pragma once

#include <chrono>

namespace oom {

// Of CLOCK_MONOTONIC, which all processes of the node share: for durations and for times that a trace compares.
inline double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Since 1970, for people and records: may jump.
inline double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace oom
