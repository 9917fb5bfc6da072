// The one table of commands and options. The parser, `oom help`, the completion scripts and the
// test that docs/CLI.md describes everything all read it. Constant data; thread-safe.

#pragma once

#include <span>
#include <string_view>

namespace oom {

class Session;

enum class OptionKind { kFlag, kText, kPath, kCount, kBytes, kDuration, kChoice };

struct OptionRow {
  // "tail" of "--tail"; how the code asks for it.
  std::string_view name;
  // With the short form: "-o,--output".
  std::string_view flags;
  OptionKind kind;
  std::string_view value;
  std::string_view help;
  // Of a kChoice: "table|wide|json".
  std::string_view choices = "";
};

enum class ArgumentKind {
  kNone,
  kJob,
  kOptionalJob,
  kJobs,
  kJobFile,
  kJobFileOrGeometry,
  kModel,
  kShell
};

struct CommandRow {
  std::string_view name;
  // Or "".
  std::string_view alias;
  ArgumentKind argument;
  std::string_view help;
  std::span<const OptionRow> options;
  int (*run)(Session* session);
};

// Of every command.
std::span<const OptionRow> GlobalOptions();
std::span<const CommandRow> Commands();

// "JOB", "[JOB]", "JOB...", "JOB.YAML", "JOB.YAML|GEOMETRY", "MODEL", "bash|zsh|fish", "".
std::string_view ArgumentSynopsis(ArgumentKind kind);

}  // namespace oom
