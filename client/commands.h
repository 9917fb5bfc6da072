// One function for each command of the table; each returns the exit code. docs/CLI.md describes
// them.

#pragma once

#include <memory>
#include <string>

#include "client/command_line.h"
#include "client/oom_client.h"
#include "client/output.h"
#include "oom/v1/job.pb.h"
#include "runtime/base/status.h"

namespace oom {

// What a command works with. Not thread-safe.
class Session {
 public:
  Session(const CommandLine* line, Output* output) : line_(*line), output_(*output) {}

  const CommandLine& line() const { return line_; }
  Output& output() { return output_; }

  // The client for --host and --timeout, made at the first call. Replaced by UseHost.
  Result<OomClient*> Client();
  void UseHost(const std::string& host);

  // Prints the error; returns its exit code.
  int Fail(const Status& status);

  // GetJob of "name" or "jobs/name". kNotFound says which job may be meant.
  Result<v1::Job> FindJob(const std::string& argument);
  // The same help for an error of another call about `argument`.
  Status WithSuggestion(Status status, const std::string& argument);

 private:
  const CommandLine& line_;
  Output& output_;
  std::string host_;
  std::unique_ptr<OomClient> client_;
};

// "jobs/tiny" of "tiny" or "jobs/tiny".
std::string JobResourceName(const std::string& argument);
// "tiny" of "jobs/tiny".
std::string JobId(const std::string& resource_name);

int RunTrain(Session* session);
int RunSubmit(Session* session);
int RunPlan(Session* session);
int RunInit(Session* session);
int RunDoctor(Session* session);
int RunList(Session* session);
int RunGet(Session* session);
int RunDescribe(Session* session);
int RunWatch(Session* session);
int RunLogs(Session* session);
int RunWait(Session* session);
int RunCancel(Session* session);
int RunSuspend(Session* session);
int RunResume(Session* session);
int RunCheckpoint(Session* session);
int RunExport(Session* session);
int RunNode(Session* session);
int RunHealth(Session* session);
int RunVersion(Session* session);
int RunCompletion(Session* session);

}  // namespace oom
