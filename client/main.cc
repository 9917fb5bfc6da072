// `oom`, the command-line client of oomd. docs/CLI.md describes it.

#include <csignal>
#include <iostream>

#include "client/command_line.h"
#include "client/commands.h"
#include "client/exit_code.h"
#include "client/output.h"

namespace oom {
namespace {

OutputForm FormOf(const std::string& name) {
  if (name == "wide") return OutputForm::kWide;
  if (name == "json") return OutputForm::kJson;
  if (name == "jsonl") return OutputForm::kJsonl;
  if (name == "yaml") return OutputForm::kYaml;
  if (name == "name") return OutputForm::kName;
  return OutputForm::kTable;
}

int Main(int argc, const char* const* argv) {
  // `oom ls | head` ends quietly.
  std::signal(SIGPIPE, SIG_DFL);
  const std::variant<CommandLine, CommandLineText> parsed = ParseCommandLine(argc, argv);
  if (const auto* text = std::get_if<CommandLineText>(&parsed)) {
    (text->is_error ? std::cerr : std::cout) << text->text << std::flush;
    return text->is_error ? kExitUsage : kExitOk;
  }
  const CommandLine& line = std::get<CommandLine>(parsed);
  const OutputForm form = FormOf(line.Text("output-form"));
  Output output(Output::Detect(form, line.Has("quiet")), &std::cout, &std::cerr);
  Session session(&line, &output);
  return line.command->run(&session);
}

}  // namespace
}  // namespace oom

int main(int argc, char** argv) { return oom::Main(argc, argv); }
