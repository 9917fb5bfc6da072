// The command line, parsed by the table of commands. CLI11 stays behind it.
// Values; thread-compatible.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "client/command_table.h"

namespace oom {

struct CommandLine {
  const CommandRow* command = nullptr;
  std::vector<std::string> arguments;
  // By OptionRow::name; only those that were given. A flag has no values.
  std::map<std::string, std::vector<std::string>, std::less<>> options;

  bool Has(std::string_view name) const { return options.contains(name); }
  // The last value given, or `fallback`.
  std::string Text(std::string_view name, std::string_view fallback = "") const;
  std::vector<std::string> List(std::string_view name) const;
  int64_t Count(std::string_view name, int64_t fallback = 0) const;
  int64_t Bytes(std::string_view name, int64_t fallback = 0) const;
  double Seconds(std::string_view name, double fallback = 0.0) const;
};

// What to print instead of running a command: help (exit 0, standard output) or a usage error (exit
// 2, standard error).
struct CommandLineText {
  std::string text;
  bool is_error = false;
};

std::variant<CommandLine, CommandLineText> ParseCommandLine(int argc, const char* const* argv);

}  // namespace oom
