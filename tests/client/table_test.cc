// What the table of commands drives beside the parser: the document and the completion scripts.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "client/command_table.h"
#include "runtime/base/file.h"
#include "tests/client/command_fixture.h"

namespace oom {
namespace {

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream input(text);
  for (std::string line; std::getline(input, line);) lines.push_back(line);
  return lines;
}

// Goal: the document, the parser and the table agree. Method: each command, option and alias of the
// table is looked for in docs/CLI.md, and each heading of the document in the table.
TEST(DocumentTest, EveryCommandAndOptionIsInTheDocumentAndNothingElseIs) {
  const Result<std::string> document = ReadFile(OOM_SOURCE_DIR "/docs/CLI.md");
  ASSERT_TRUE(document.ok()) << document.status().ToString();
  std::set<std::string> headings;
  std::map<std::string, std::string> sections;
  std::string heading;
  for (const std::string& line : Lines(*document)) {
    if (line.starts_with("### `oom ")) heading = line.substr(9, line.find_first_of(" `", 9) - 9);
    if (line.starts_with("## ")) heading = "";
    sections[heading] += line + "\n";
  }
  for (const OptionRow& row : GlobalOptions()) {
    const std::string longest(row.flags.substr(row.flags.rfind(',') + 1));
    EXPECT_NE(document->find("`" + longest), std::string::npos) << longest;
  }
  std::set<std::string> names;
  for (const CommandRow& command : Commands()) {
    const std::string name(command.name);
    names.insert(name);
    ASSERT_TRUE(sections.contains(name)) << name << " has no section in docs/CLI.md";
    std::string synopsis = "### `oom " + name;
    if (command.argument != ArgumentKind::kNone) {
      synopsis += " " + std::string(ArgumentSynopsis(command.argument));
    }
    EXPECT_NE(sections[name].find(synopsis + "`"), std::string::npos) << synopsis;
    for (const OptionRow& row : command.options) {
      std::istringstream flags{std::string(row.flags)};
      for (std::string flag; std::getline(flags, flag, ',');) {
        EXPECT_NE(sections[name].find("`" + flag), std::string::npos) << name << " " << flag;
      }
    }
  }
  for (const auto& [name, text] : sections) {
    EXPECT_TRUE(name.empty() || names.contains(name)) << "docs/CLI.md describes oom " << name;
  }
}

// The words that bash offers for `words`, the last one unfinished.
std::string Completions(const std::string& words, const std::string& folder,
                        const std::string& socket) {
  const std::string script =
      "PATH=" + std::filesystem::path(OOM_PROGRAM).parent_path().string() +
      ":$PATH; source <(oom completion bash); COMP_WORDS=(" + words +
      "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _oom; echo \"${COMPREPLY[*]}\"";
  OomOptions options;
  options.program = "/bin/bash";
  options.folder = folder;
  options.environment["OOM_HOST"] = socket;
  return RunOom({"-c", script}, options).data;
}

TEST_F(CommandTest, CompletionOffersCommandsOptionsFormsAndJobs) {
  fake_->Publish(MakeJob("alpha", v1::JOB_STATE_RUNNING));
  fake_->Publish(MakeJob("alto", v1::JOB_STATE_RUNNING));
  EXPECT_EQ(Completions("oom des", folder_, socket_), "describe\n");
  EXPECT_EQ(Completions("oom -o json su", folder_, socket_), "submit suspend\n");
  EXPECT_EQ(Completions("oom cancel --n", folder_, socket_), "--now\n");
  EXPECT_EQ(Completions("oom ls -o js", folder_, socket_), "json jsonl\n");
  EXPECT_EQ(Completions("oom get al", folder_, socket_), "alpha alto\n");
  EXPECT_EQ(Completions("oom completion z", folder_, socket_), "zsh\n");
  EXPECT_EQ(Completions("oom train jo", folder_, socket_), "job.yaml\n");
  EXPECT_EQ(Completions("oom get al", folder_, folder_ + "/none.sock"), "\n");
}

TEST_F(CommandTest, EveryShellsScriptNamesEveryCommand) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = Run({"completion", shell}).data;
    for (const CommandRow& command : Commands()) {
      EXPECT_NE(script.find(command.name), std::string::npos) << shell << " " << command.name;
      for (const OptionRow& row : command.options) {
        const size_t dashes = row.flags.rfind("--");
        const std::string name(row.flags.substr(dashes + 2));
        EXPECT_NE(script.find(name), std::string::npos) << shell << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace oom
