// The commands about the node, the daemon and this program.

#include <nlohmann/json.hpp>
#include <utility>

#include "client/commands.h"
#include "client/completion.h"
#include "client/doctor.h"
#include "client/exit_code.h"
#include "client/init.h"
#include "client/job_view.h"
#include "client/version.h"
#include "runtime/base/file.h"

namespace oom {

int RunNode(Session* session) {
  const Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  const Result<v1::Node> node = (*client)->GetNode();
  if (!node.ok()) return session->Fail(node.status());
  WriteNode(*node, &session->output());
  return kExitOk;
}

int RunHealth(Session* session) {
  const Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  const Result<bool> serving =
      (*client)->IsServing(session->line().Has("ready") ? "readiness" : "");
  if (!serving.ok()) return session->Fail(serving.status());
  const char* text = *serving ? "SERVING" : "NOT_SERVING";
  Output& output = session->output();
  if (output.form() == OutputForm::kJson || output.form() == OutputForm::kJsonl) {
    output.Line(nlohmann::json{{"status", text}}.dump());
  } else {
    output.Line(text);
  }
  return *serving ? kExitOk : kExitError;
}

int RunVersion(Session* session) {
  // An answer about oom must not hang on oomd.
  std::string daemon;
  if (const Result<OomClient*> client = session->Client(); client.ok()) {
    const Result<v1::Node> node = (*client)->GetNode();
    if (node.ok()) daemon = node->version();
  }
  Output& output = session->output();
  if (output.form() == OutputForm::kJson || output.form() == OutputForm::kJsonl) {
    output.Line(nlohmann::json{{"oom", kVersion}, {"oomd", daemon}}.dump());
    return kExitOk;
  }
  output.Line(std::string("oom ") + kVersion);
  output.Line("oomd " + (daemon.empty() ? "not reached" : Printable(daemon)));
  return kExitOk;
}

int RunCompletion(Session* session) {
  session->output().data() << CompletionScript(session->line().arguments.front()) << std::flush;
  return kExitOk;
}

int RunInit(Session* session) {
  const CommandLine& line = session->line();
  const Result<std::string> text = JobFileForModel(line.arguments.front());
  if (!text.ok()) return session->Fail(text.status());
  const std::string file = line.Text("file", "job.yaml");
  if (file == "-") {
    session->output().data() << *text << std::flush;
    return kExitOk;
  }
  if (!line.Has("force") && ReadFile(file).ok()) {
    return session->Fail(
        Status(Code::kAlreadyExists, file + " is there already; --force replaces it"));
  }
  const Status written = WriteFileAtomically(file, *text);
  if (!written.ok()) return session->Fail(written);
  session->output().Line(file);
  session->output().Message("set data.train, then: oom plan " + file + " && oom train " + file);
  return kExitOk;
}

int RunDoctor(Session* session) {
  std::vector<Finding> findings = ExamineMachine(MachineFiles());
  Finding daemon{.name = "daemon", .level = FindingLevel::kOk};
  const Result<OomClient*> client = session->Client();
  const Result<v1::Node> node =
      client.ok() ? (*client)->GetNode() : Result<v1::Node>(client.status());
  if (node.ok()) {
    daemon.text = "oomd " + node->version() + " answers at " + (*client)->path();
  } else {
    daemon.level = FindingLevel::kWarning;
    daemon.text = node.status().message();
    daemon.fix = "oomd --foreground &";
  }
  findings.push_back(std::move(daemon));
  WriteFindings(findings, &session->output());
  for (const Finding& finding : findings) {
    if (finding.level == FindingLevel::kError) return kExitError;
  }
  return kExitOk;
}

}  // namespace oom
