#include "runtime/base/units.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace oom {
namespace {

struct Suffix {
  std::string_view name;
  double factor;
};

// Splits "1.5 GiB" into 1.5 and "GiB". Fails with kInvalidArgument on a missing or negative number.
Result<std::pair<double, std::string_view>> SplitNumber(std::string_view text,
                                                        std::string_view kind) {
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number) || number < 0.0) {
    return Status(Code::kInvalidArgument,
                  "'" + std::string(text) + "' is not a " + std::string(kind));
  }
  std::string_view rest = text.substr(static_cast<size_t>(end - text.data()));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  return std::pair(number, rest);
}

template <size_t N>
Result<double> Scale(std::string_view text, std::string_view kind,
                     const std::array<Suffix, N>& suffixes) {
  OOM_ASSIGN_OR_RETURN(const auto split, SplitNumber(text, kind));
  for (const Suffix& suffix : suffixes) {
    if (split.second == suffix.name) return split.first * suffix.factor;
  }
  return Status(Code::kInvalidArgument, "'" + std::string(text) + "' is not a " +
                                            std::string(kind) + ": unknown unit '" +
                                            std::string(split.second) + "'");
}

}  // namespace

Result<int64_t> ParseBytes(std::string_view text) {
  constexpr std::array<Suffix, 10> kSuffixes = {{{"", 1},
                                                 {"B", 1},
                                                 {"KiB", 1024.0},
                                                 {"MiB", 1048576.0},
                                                 {"GiB", 1073741824.0},
                                                 {"TiB", 1099511627776.0},
                                                 {"KB", 1e3},
                                                 {"MB", 1e6},
                                                 {"GB", 1e9},
                                                 {"TB", 1e12}}};
  OOM_ASSIGN_OR_RETURN(const double bytes, Scale(text, "byte count (such as 24GiB)", kSuffixes));
  if (bytes >= 9.2e18) {
    return Status(Code::kInvalidArgument, "'" + std::string(text) + "' is too many bytes");
  }
  return static_cast<int64_t>(std::llround(bytes));
}

std::string FormatBytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::fabs(value) >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  char buffer[48];
  const int decimals = unit == 0 ? 0 : (std::fabs(value) < 10.0 ? 2 : 1);
  std::snprintf(buffer, sizeof(buffer), "%.*f %s", decimals, value, kUnits[unit]);
  return buffer;
}

Result<double> ParseSeconds(std::string_view text) {
  constexpr std::array<Suffix, 6> kSuffixes = {
      {{"", 1}, {"s", 1}, {"ms", 1e-3}, {"m", 60}, {"h", 3600}, {"d", 86400}}};
  return Scale(text, "duration (such as 30s)", kSuffixes);
}

std::string FormatSeconds(double seconds) {
  char buffer[48];
  if (seconds < 10.0) {
    std::snprintf(buffer, sizeof(buffer), "%.1fs", seconds);
    return buffer;
  }
  const int64_t whole = std::llround(seconds);
  if (whole < 60) {
    std::snprintf(buffer, sizeof(buffer), "%llds", static_cast<long long>(whole));
  } else if (whole < 3600) {
    std::snprintf(buffer, sizeof(buffer), "%lldm %02llds", static_cast<long long>(whole / 60),
                  static_cast<long long>(whole % 60));
  } else {
    std::snprintf(buffer, sizeof(buffer), "%lldh %02lldm", static_cast<long long>(whole / 3600),
                  static_cast<long long>(whole % 3600 / 60));
  }
  return buffer;
}

}  // namespace oom
