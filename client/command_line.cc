#include "client/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <sstream>

#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

std::vector<std::string> SplitChoices(std::string_view choices) {
  std::vector<std::string> out;
  std::istringstream input{std::string(choices)};
  for (std::string choice; std::getline(input, choice, '|');) out.push_back(choice);
  return out;
}

std::string CheckCount(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool ok = error == std::errc() && end == text.data() + text.size() && value >= 0;
  return ok ? "" : "'" + text + "' is not a whole number from 0";
}

std::string CheckBytes(const std::string& text) {
  const Result<int64_t> bytes = ParseBytes(text);
  return bytes.ok() ? "" : bytes.status().message();
}

std::string CheckDuration(const std::string& text) {
  const Result<double> seconds = ParseSeconds(text);
  return seconds.ok() ? "" : seconds.status().message();
}

// What CLI11 fills while it parses; moved into a CommandLine afterwards.
struct Slot {
  const OptionRow* row = nullptr;
  CLI::Option* option = nullptr;
  std::vector<std::string> values;
};

class Parser {
 public:
  Parser() : app_("Train mixture-of-experts language models with host-memory offload", "oom") {
    app_.require_subcommand(1);
    // Options of every command may stand before or after its name.
    app_.fallthrough();
    for (const OptionRow& row : GlobalOptions()) AddOption(&app_, row, &global_);
    for (const CommandRow& command : Commands()) AddCommand(command);
    app_.footer(
        "Exit codes: 0 ok, 1 error, 2 usage, 3 no daemon, 4 not found, 5 denied, 6 invalid,\n"
        "7 conflict, 8 quota, 10 failed, 11 cancelled, 124 timeout, 130 detached.");
  }

  std::variant<CommandLine, CommandLineText> Parse(int argc, const char* const* argv) {
    if (std::string unknown = UnknownCommand(argc, argv); !unknown.empty()) {
      return CommandLineText{std::move(unknown), true};
    }
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      std::ostringstream out;
      std::ostringstream messages;
      if (app_.exit(error, out, messages) == 0) return CommandLineText{out.str(), false};
      return CommandLineText{"oom: " + messages.str(), true};
    }
    CommandLine line;
    for (size_t i = 0; i < commands_.size(); ++i) {
      Entry& entry = *commands_[i];
      if (!entry.app->parsed()) continue;
      line.command = entry.row;
      line.arguments = std::move(entry.arguments);
      Collect(&entry.options, &line);
    }
    Collect(&global_, &line);
    return line;
  }

 private:
  struct Entry {
    const CommandRow* row = nullptr;
    CLI::App* app = nullptr;
    std::vector<std::string> arguments;
    std::vector<std::unique_ptr<Slot>> options;
  };

  static void AddOption(CLI::App* app, const OptionRow& row,
                        std::vector<std::unique_ptr<Slot>>* slots) {
    auto slot = std::make_unique<Slot>();
    slot->row = &row;
    const std::string flags(row.flags);
    const std::string help(row.help);
    if (row.kind == OptionKind::kFlag) {
      slot->option = app->add_flag(flags, help);
    } else {
      slot->option = app->add_option(flags, slot->values, help);
      // Only ever one value: what follows it is the command's own word.
      slot->option->type_name(std::string(row.value))->type_size(1)->expected(1);
      slot->option->allow_extra_args(false);
      slot->option->multi_option_policy(row.name == "rank" ? CLI::MultiOptionPolicy::TakeAll
                                                           : CLI::MultiOptionPolicy::TakeLast);
    }
    if (row.kind == OptionKind::kCount) slot->option->check(CheckCount);
    if (row.kind == OptionKind::kBytes) slot->option->check(CheckBytes);
    if (row.kind == OptionKind::kDuration) slot->option->check(CheckDuration);
    if (row.kind == OptionKind::kChoice) {
      const std::vector<std::string> choices = SplitChoices(row.choices);
      const std::string list(row.choices);
      slot->option->check([choices, list](const std::string& text) {
        const bool known = std::find(choices.begin(), choices.end(), text) != choices.end();
        return known ? std::string() : "'" + text + "' is not one of " + list;
      });
    }
    slots->push_back(std::move(slot));
  }

  void AddCommand(const CommandRow& command) {
    auto entry = std::make_unique<Entry>();
    entry->row = &command;
    const bool several = command.argument == ArgumentKind::kJobs;
    entry->app = app_.add_subcommand(std::string(command.name), std::string(command.help));
    if (!command.alias.empty()) entry->app->alias(std::string(command.alias));
    for (const OptionRow& row : command.options) AddOption(entry->app, row, &entry->options);
    if (command.argument != ArgumentKind::kNone) {
      CLI::Option* argument =
          entry->app->add_option(std::string(ArgumentName(command.argument)), entry->arguments, "");
      argument->type_name("");
      if (several) {
        argument->expected(-1);
      } else {
        argument->expected(1);
      }
      if (command.argument != ArgumentKind::kOptionalJob) argument->required();
      if (command.argument == ArgumentKind::kShell) {
        argument->check(CLI::IsMember(SplitChoices(ArgumentSynopsis(command.argument))));
      }
    }
    commands_.push_back(std::move(entry));
  }

  static std::string_view ArgumentName(ArgumentKind kind) {
    switch (kind) {
      case ArgumentKind::kJobFile:
      case ArgumentKind::kJobFileOrGeometry:
        return "JOB.YAML";
      case ArgumentKind::kModel:
        return "MODEL";
      case ArgumentKind::kShell:
        return "SHELL";
      default:
        return "JOB";
    }
  }

  // The message for a first word that is no command, or "".
  static std::string UnknownCommand(int argc, const char* const* argv) {
    std::vector<std::string> names;
    for (const CommandRow& command : Commands()) {
      names.emplace_back(command.name);
      if (!command.alias.empty()) names.emplace_back(command.alias);
    }
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word.starts_with('-')) {
        // The value of a global option is not a command.
        for (const OptionRow& row : GlobalOptions()) {
          const std::string flags = "," + std::string(row.flags) + ",";
          if (row.kind != OptionKind::kFlag && flags.find("," + word + ",") != std::string::npos)
            ++i;
        }
        continue;
      }
      if (std::find(names.begin(), names.end(), word) != names.end()) return "";
      std::string text = "oom: unknown command '" + word + "'";
      const std::string closest = ClosestName(word, names);
      if (!closest.empty()) text += "; did you mean '" + closest + "'?";
      return text + "\nRun `oom --help` for the list.\n";
    }
    return "";
  }

  static void Collect(std::vector<std::unique_ptr<Slot>>* slots, CommandLine* line) {
    for (const auto& slot : *slots) {
      if (slot->option->count() == 0) continue;
      line->options[std::string(slot->row->name)] = std::move(slot->values);
    }
  }

  CLI::App app_;
  std::vector<std::unique_ptr<Slot>> global_;
  std::vector<std::unique_ptr<Entry>> commands_;
};

}  // namespace

std::string CommandLine::Text(std::string_view name, std::string_view fallback) const {
  const auto found = options.find(name);
  if (found == options.end() || found->second.empty()) return std::string(fallback);
  return found->second.back();
}

std::vector<std::string> CommandLine::List(std::string_view name) const {
  const auto found = options.find(name);
  return found == options.end() ? std::vector<std::string>() : found->second;
}

int64_t CommandLine::Count(std::string_view name, int64_t fallback) const {
  const std::string text = Text(name);
  int64_t value = fallback;
  // The parser checked the form.
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

int64_t CommandLine::Bytes(std::string_view name, int64_t fallback) const {
  if (!Has(name)) return fallback;
  const Result<int64_t> bytes = ParseBytes(Text(name));
  return bytes.ok() ? *bytes : fallback;
}

double CommandLine::Seconds(std::string_view name, double fallback) const {
  if (!Has(name)) return fallback;
  const Result<double> seconds = ParseSeconds(Text(name));
  return seconds.ok() ? *seconds : fallback;
}

std::variant<CommandLine, CommandLineText> ParseCommandLine(int argc, const char* const* argv) {
  return Parser().Parse(argc, argv);
}

}  // namespace oom
