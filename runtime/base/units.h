// Byte literals (64_MiB) and the text form of byte counts and durations that job files, configuration
// and the command line share. Pure functions.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/base/status.h"

namespace oom {

constexpr int64_t operator""_KiB(unsigned long long count) { return static_cast<int64_t>(count) << 10; }
constexpr int64_t operator""_MiB(unsigned long long count) { return static_cast<int64_t>(count) << 20; }
constexpr int64_t operator""_GiB(unsigned long long count) { return static_cast<int64_t>(count) << 30; }

// "24GiB", "1.5 GiB", "512MB", "4096": bytes. Binary suffixes KiB MiB GiB TiB, decimal KB MB GB TB, B.
// Fails with kInvalidArgument on anything else, negative counts and overflow included.
Result<int64_t> ParseBytes(std::string_view text);

// "1.50 GiB", "640 B": at most three significant decimals, the largest binary unit that keeps it >= 1.
std::string FormatBytes(int64_t bytes);

// "30s", "500ms", "10m", "2h", "1d": seconds. Fails with kInvalidArgument.
Result<double> ParseSeconds(std::string_view text);

// "1h 02m", "3m 20s", "12s", "0.4s".
std::string FormatSeconds(double seconds);

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace oom
