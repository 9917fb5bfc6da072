#include "client/completion.h"

#include <algorithm>
#include <vector>

#include "client/command_table.h"
#include "runtime/base/check.h"

namespace oom {
namespace {

constexpr char kJobNames[] = "oom ls -q -o name --timeout 300ms 2>/dev/null";

std::vector<std::string> Split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return parts;
}

std::string Replace(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

std::vector<std::string> Names(const CommandRow& command) {
  std::vector<std::string> names = {std::string(command.name)};
  if (!command.alias.empty()) names.emplace_back(command.alias);
  return names;
}

std::string AllNames() {
  std::string names;
  for (const CommandRow& command : Commands()) {
    for (const std::string& name : Names(command)) names += (names.empty() ? "" : " ") + name;
  }
  return names;
}

std::string AllFlags(std::span<const OptionRow> options) {
  std::string flags;
  for (const OptionRow& row : options) {
    for (const std::string& flag : Split(row.flags, ','))
      flags += (flags.empty() ? "" : " ") + flag;
  }
  return flags;
}

bool TakesJob(ArgumentKind kind) {
  return kind == ArgumentKind::kJob || kind == ArgumentKind::kJobs ||
         kind == ArgumentKind::kOptionalJob;
}

bool TakesFile(const CommandRow& command) {
  return command.argument == ArgumentKind::kJobFile ||
         command.argument == ArgumentKind::kJobFileOrGeometry ||
         command.argument == ArgumentKind::kModel || command.name == "export";
}

bool IsPath(const OptionRow& row) { return row.kind == OptionKind::kPath; }

// `case` patterns of the options of `options` for which `wanted` holds, joined by |.
template <class Wanted>
std::string Patterns(std::span<const OptionRow> options, const Wanted& wanted) {
  std::string patterns;
  for (const OptionRow& row : options) {
    if (!wanted(row)) continue;
    for (const std::string& flag : Split(row.flags, ',')) {
      patterns += (patterns.empty() ? "" : "|") + flag;
    }
  }
  return patterns;
}

// A `case` branch of bash for each option of `options` that has choices.
std::string BashChoices(std::span<const OptionRow> options) {
  std::string branches;
  for (const OptionRow& row : options) {
    if (row.kind != OptionKind::kChoice) continue;
    branches += "    " + Replace(std::string(row.flags), ",", "|") +
                ") COMPREPLY=($(compgen -W \"" + Replace(std::string(row.choices), "|", " ") +
                "\" -- \"$current\")); return ;;\n";
  }
  return branches;
}

std::string BashScript() {
  std::string script = "# bash completion of oom: source <(oom completion bash)\n_oom() {\n";
  script += "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}\n";
  script += "  local command= i flags=\"" + AllFlags(GlobalOptions()) + "\"\n";
  // The value of a global option in front of the command is no command.
  script += "  for ((i = 1; i < COMP_CWORD; i++)); do\n    case ${COMP_WORDS[i]} in\n";
  script += "      " +
            Patterns(GlobalOptions(),
                     [](const OptionRow& row) { return row.kind != OptionKind::kFlag; }) +
            ") ((i++)) ;;\n";
  script += "      -*) ;;\n      *) command=${COMP_WORDS[i]}; break ;;\n    esac\n  done\n";
  script += "  COMPREPLY=()\n  case $previous in\n";
  script += BashChoices(GlobalOptions()) + "    " + Patterns(GlobalOptions(), IsPath) +
            ") COMPREPLY=($(compgen -f -- \"$current\")); return ;;\n  esac\n";
  script +=
      "  if [[ -z $command ]]; then\n    if [[ $current == -* ]]; then\n"
      "      COMPREPLY=($(compgen -W \"$flags\" -- \"$current\"))\n    else\n"
      "      COMPREPLY=($(compgen -W \"" +
      AllNames() +
      "\" -- \"$current\"))\n    fi\n"
      "    return\n  fi\n  case $command in\n";
  for (const CommandRow& command : Commands()) {
    std::string names;
    for (const std::string& name : Names(command)) names += (names.empty() ? "" : "|") + name;
    script += "    " + names + ")\n";
    const std::string paths = Patterns(command.options, IsPath);
    if (!paths.empty()) {
      script += "      case $previous in " + paths +
                ") COMPREPLY=($(compgen -f -- \"$current\")); return ;; esac\n";
    }
    const std::string choices = BashChoices(command.options);
    if (!choices.empty()) script += "      case $previous in\n" + choices + "      esac\n";
    script += "      if [[ $current == -* ]]; then COMPREPLY=($(compgen -W \"$flags " +
              AllFlags(command.options) + "\" -- \"$current\")); return; fi\n";
    if (TakesJob(command.argument)) {
      script +=
          std::string("      COMPREPLY=($(compgen -W \"$(") + kJobNames + ")\" -- \"$current\"))\n";
    }
    if (TakesFile(command)) script += "      COMPREPLY+=($(compgen -f -- \"$current\"))\n";
    if (command.argument == ArgumentKind::kShell) {
      script += "      COMPREPLY=($(compgen -W \"bash zsh fish\" -- \"$current\"))\n";
    }
    script += "      ;;\n";
  }
  return script + "  esac\n}\ncomplete -o filenames -F _oom oom\n";
}

// One _arguments specification for each flag of `options`.
std::string ZshOptions(std::span<const OptionRow> options) {
  std::string text;
  for (const OptionRow& row : options) {
    const std::string help = Replace(Replace(std::string(row.help), "'", "'\\''"), ":", "\\:");
    for (const std::string& flag : Split(row.flags, ',')) {
      text += " \\\n        '*" + flag + "[" + help + "]";
      if (row.kind != OptionKind::kFlag) {
        text += ":" + std::string(row.value) + ":";
        if (row.kind == OptionKind::kChoice) {
          text += "(" + Replace(std::string(row.choices), "|", " ") + ")";
        }
        if (IsPath(row)) text += "_files";
      }
      text += "'";
    }
  }
  return text;
}

std::string ZshScript() {
  std::string script =
      "#compdef oom\n# zsh completion of oom: oom completion zsh > "
      "\"${fpath[1]}/_oom\"\n";
  script += std::string("_oom_jobs() { local -a jobs; jobs=(${(f)\"$(") + kJobNames +
            ")\"}); compadd -a jobs }\n";
  script += "_oom_exports() { _oom_jobs; _files -/ }\n_oom() {\n  local context state line\n";
  script += "  _arguments -C" + ZshOptions(GlobalOptions()) +
            " \\\n        '1:command:->command' '*::argument:->argument'\n";
  script += "  case $state in\n    command)\n      local -a commands=(\n";
  for (const CommandRow& command : Commands()) {
    for (const std::string& name : Names(command)) {
      script += "        '" + name + ":" + Replace(std::string(command.help), "'", "'\\''") + "'\n";
    }
  }
  script +=
      "      )\n      _describe command commands ;;\n    argument)\n      case $words[1] in\n";
  for (const CommandRow& command : Commands()) {
    std::string names;
    for (const std::string& name : Names(command)) names += (names.empty() ? "" : "|") + name;
    script += "        " + names + ") _arguments" + ZshOptions(GlobalOptions()) +
              ZshOptions(command.options);
    if (command.name == "export") {
      script += " \\\n        '*:job:_oom_exports'";
    } else if (TakesJob(command.argument)) {
      script += " \\\n        '*:job:_oom_jobs'";
    } else if (TakesFile(command)) {
      script += " \\\n        '*:file:_files'";
    } else if (command.argument == ArgumentKind::kShell) {
      script += " \\\n        '1:shell:(bash zsh fish)'";
    }
    script += " ;;\n";
  }
  return script +
         "      esac ;;\n  esac\n}\n"
         "if [[ $funcstack[1] == _oom ]]; then _oom \"$@\"; else compdef _oom oom; fi\n";
}

// The flags of one option as fish wants them, with its argument.
std::string FishOption(const OptionRow& row) {
  std::string text;
  for (const std::string& flag : Split(row.flags, ',')) {
    text += flag.starts_with("--") ? " -l " + flag.substr(2) : " -s " + flag.substr(1);
  }
  if (row.kind != OptionKind::kFlag) text += IsPath(row) ? " -r -F" : " -x";
  if (row.kind == OptionKind::kChoice) {
    text += " -a '" + Replace(std::string(row.choices), "|", " ") + "'";
  }
  return text + " -d '" + Replace(std::string(row.help), "'", "\\'") + "'";
}

std::string FishScript() {
  std::string script =
      "# fish completion of oom: oom completion fish | source\ncomplete -c oom -f\n";
  for (const OptionRow& row : GlobalOptions()) script += "complete -c oom" + FishOption(row) + "\n";
  for (const CommandRow& command : Commands()) {
    std::string names;
    for (const std::string& name : Names(command)) {
      script += "complete -c oom -n __fish_use_subcommand -a " + name + " -d '" +
                Replace(std::string(command.help), "'", "\\'") + "'\n";
      names += (names.empty() ? "" : " ") + name;
    }
    const std::string here = "complete -c oom -n '__fish_seen_subcommand_from " + names + "'";
    for (const OptionRow& row : command.options) script += here + FishOption(row) + "\n";
    if (TakesJob(command.argument)) script += here + " -a '(" + kJobNames + ")'\n";
    if (TakesFile(command)) script += here + " -F\n";
    if (command.argument == ArgumentKind::kShell) script += here + " -a 'bash zsh fish'\n";
  }
  return script;
}

}  // namespace

std::string CompletionScript(std::string_view shell) {
  if (shell == "bash") return BashScript();
  if (shell == "zsh") return ZshScript();
  OOM_CHECK_MSG(shell == "fish", "the command line lets no other shell through");
  return FishScript();
}

}  // namespace oom
