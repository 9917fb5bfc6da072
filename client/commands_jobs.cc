// The commands about jobs that are there already.

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "client/commands.h"
#include "client/embedded_daemon.h"
#include "client/exit_code.h"
#include "client/follow.h"
#include "client/job_view.h"
#include "runtime/base/clock.h"

namespace oom {
namespace {

constexpr int kPageSize = 1000;
constexpr double kLogPatienceSeconds = 120.0;
// What `oom logs --rank host` asks for.
constexpr int kJobHostRank = -1;

// `act` on each job; the first failure is the exit code, but every job gets its turn.
int ForEachJob(Session* session, const std::function<Status(OomClient*, const std::string&)>& act) {
  const Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  int code = kExitOk;
  for (const std::string& argument : session->line().arguments) {
    const Status status =
        session->WithSuggestion(act(*client, JobResourceName(argument)), argument);
    if (status.ok()) continue;
    const int failed = session->Fail(status);
    if (code == kExitOk) code = failed;
  }
  return code;
}

// What a change answers: the job in the forms for scripts, one line for a human.
void ReportChange(Session* session, const v1::Job& job) {
  if (!session->output().is_table()) {
    WriteJob(job, UnixSeconds(), &session->output());
    return;
  }
  std::string text = JobId(job.name()) + ": " + StateName(job.state());
  if (!job.reason().empty()) text += " (" + job.reason() + ")";
  session->output().Message(text);
}

int ReportChanges(Session* session,
                  const std::function<Result<v1::Job>(OomClient*, const std::string&)>& change) {
  return ForEachJob(session, [&](OomClient* client, const std::string& name) -> Status {
    OOM_ASSIGN_OR_RETURN(const v1::Job job, change(client, name));
    ReportChange(session, job);
    return Status::Ok();
  });
}

Result<std::vector<v1::Job>> ListAll(OomClient* client, v1::JobState state) {
  v1::ListJobsRequest request;
  request.set_page_size(kPageSize);
  if (state != v1::JOB_STATE_UNSPECIFIED) request.add_states(state);
  std::vector<v1::Job> jobs;
  do {
    OOM_ASSIGN_OR_RETURN(v1::ListJobsResponse page, client->ListJobs(request));
    for (v1::Job& job : *page.mutable_jobs()) jobs.push_back(std::move(job));
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return jobs;
}

// "host" and numbers to ranks. Fails with kInvalidArgument.
Status AddRanks(const CommandLine& line, v1::StreamLogsRequest* request) {
  for (const std::string& text : line.List("rank")) {
    int rank = kJobHostRank;
    if (text != "host") {
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
      if (error != std::errc() || end != text.data() + text.size() || rank < 0) {
        return Status(Code::kInvalidArgument,
                      "--rank is a number from 0 or `host`, not '" + text + "'")
            .WithField("--rank");
      }
    }
    request->add_ranks(rank);
  }
  return Status::Ok();
}

// Prints log lines; knows which it has seen, so that a stream that broke can start anew.
class LogPrinter {
 public:
  LogPrinter(Session* session, bool prefix) : session_(*session), prefix_(prefix) {
    // On a terminal a log must not move the cursor or set its title.
    escape_ = session_.output().options().data_is_terminal && !session_.line().Has("raw");
  }

  void Print(const v1::LogChunk& chunk) {
    int64_t& seen = seen_bytes_[{chunk.attempt(), chunk.rank()}];
    if (chunk.offset_bytes() != 0 && chunk.offset_bytes() <= seen) return;
    seen = chunk.offset_bytes();
    Output& output = session_.output();
    if (!output.is_table()) {
      output.Line(MessageToJson(chunk, false));
      return;
    }
    std::string line;
    if (prefix_) {
      line = chunk.rank() < 0 ? "[host] " : "[rank " + std::to_string(chunk.rank()) + "] ";
    }
    output.Line(line + (escape_ ? Printable(chunk.line()) : chunk.line()));
  }

 private:
  Session& session_;
  const bool prefix_;
  bool escape_ = false;
  std::map<std::pair<int, int>, int64_t> seen_bytes_;
};

}  // namespace

int RunList(Session* session) {
  v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
  if (session->line().Has("state")) {
    std::string closest;
    state = ParseState(session->line().Text("state"), &closest);
    if (state == v1::JOB_STATE_UNSPECIFIED) {
      session->output().ErrorText("oom: unknown state '" + session->line().Text("state") + "'" +
                                  (closest.empty() ? "" : "; did you mean '" + closest + "'?"));
      return kExitUsage;
    }
  }
  const Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  const Result<std::vector<v1::Job>> jobs = ListAll(*client, state);
  if (!jobs.ok()) return session->Fail(jobs.status());
  WriteJobs(*jobs, UnixSeconds(), &session->output());
  return kExitOk;
}

namespace {

int ShowJobs(Session* session, bool describe) {
  std::vector<v1::Job> jobs;
  int code = kExitOk;
  for (const std::string& argument : session->line().arguments) {
    Result<v1::Job> job = session->FindJob(argument);
    if (job.ok()) {
      jobs.push_back(*std::move(job));
      continue;
    }
    const int failed = session->Fail(job.status());
    if (code == kExitOk) code = failed;
  }
  Output& output = session->output();
  if (describe && output.is_table()) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (i > 0) output.Line("");
      WriteDescription(jobs[i], UnixSeconds(), &output);
    }
  } else if (session->line().arguments.size() == 1 && !jobs.empty()) {
    WriteJob(jobs.front(), UnixSeconds(), &output);
  } else if (!jobs.empty()) {
    WriteJobs(jobs, UnixSeconds(), &output);
  }
  return code;
}

}  // namespace

int RunGet(Session* session) { return ShowJobs(session, false); }
int RunDescribe(Session* session) { return ShowJobs(session, true); }

int RunLogs(Session* session) {
  const CommandLine& line = session->line();
  v1::StreamLogsRequest request;
  const Status ranks = AddRanks(line, &request);
  if (!ranks.ok()) return session->Fail(ranks);
  const Result<v1::Job> job = session->FindJob(line.arguments.front());
  if (!job.ok()) return session->Fail(job.status());
  OomClient* const client = *session->Client();
  request.set_name(job->name());
  request.set_follow(line.Has("follow"));
  request.set_tail_lines(line.Count("tail"));
  LogPrinter printer(session, request.ranks_size() != 1);
  for (int attempt = 1;; ++attempt) {
    bool heard = false;
    const Status status = client->StreamLogs(request, [&](const v1::LogChunk& chunk) {
      heard = true;
      printer.Print(chunk);
      return session->output().data().good();
    });
    if (status.ok()) return kExitOk;
    const bool lost = status.code() == Code::kUnavailable && request.follow();
    if (!lost || attempt > kLogPatienceSeconds) return session->Fail(status);
    if (heard) attempt = 1;
    // What came already is skipped; what was written meanwhile is not.
    request.clear_tail_lines();
    client->Backoff(attempt);
  }
}

int RunWait(Session* session) {
  const Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  // Waiting includes waiting for oomd; with --timeout as long as that allows.
  const double patience = session->line().Has("timeout") ? std::numeric_limits<double>::infinity()
                                                         : WatchOptions().patience_seconds;
  const std::string& argument = session->line().arguments.front();
  const Result<v1::Job> job = WaitForEnd(*client, JobResourceName(argument), patience);
  if (!job.ok()) return session->Fail(session->WithSuggestion(job.status(), argument));
  ReportChange(session, *job);
  return ExitCodeOf(job->state());
}

int RunCancel(Session* session) {
  v1::CancelJobRequest request;
  request.set_mode(session->line().Has("now") ? v1::CANCEL_MODE_NOW : v1::CANCEL_MODE_CHECKPOINT);
  request.set_grace_seconds(session->line().Seconds("grace"));
  return ReportChanges(session, [&](OomClient* client, const std::string& name) {
    request.set_name(name);
    return client->CancelJob(request);
  });
}

int RunSuspend(Session* session) {
  return ReportChanges(
      session, [](OomClient* client, const std::string& name) { return client->SuspendJob(name); });
}

int RunResume(Session* session) {
  return ReportChanges(
      session, [](OomClient* client, const std::string& name) { return client->ResumeJob(name); });
}

int RunCheckpoint(Session* session) {
  return ForEachJob(session, [&](OomClient* client, const std::string& name) -> Status {
    OOM_ASSIGN_OR_RETURN(const v1::CheckpointJobResponse made, client->CheckpointJob(name));
    Output& output = session->output();
    if (output.is_table() || output.form() == OutputForm::kName) {
      output.Line(Printable(made.path()));
      output.Message(JobId(name) + ": step " + std::to_string(made.durable_step()) + " is durable");
    } else {
      output.Line(MessageToJson(made, output.form() == OutputForm::kJson));
    }
    return Status::Ok();
  });
}

int RunExport(Session* session) {
  const CommandLine& line = session->line();
  const std::string& argument = line.arguments.front();
  std::error_code ignored;
  std::string folder;
  // A folder is an output directory, unless it just happens to be called like a job.
  if (argument.find('/') != std::string::npos && !argument.starts_with("jobs/")) {
    folder = argument;
  } else if (std::filesystem::is_directory(std::filesystem::path(argument) / "checkpoints",
                                           ignored)) {
    folder = argument;
  } else {
    const Result<v1::Job> job = session->FindJob(argument);
    if (!job.ok()) return session->Fail(job.status());
    folder = job->spec().output();
  }
  if (!std::filesystem::is_directory(folder, ignored)) {
    return session->Fail(Status(Code::kNotFound, "there is no output directory " + folder));
  }
  const Result<std::string> program = ProgramBeside("oom-export");
  if (!program.ok()) {
    session->output().Error(program.status());
    return kExitError;
  }
  std::vector<std::string> words = {*program, "--output-directory", folder};
  if (line.Has("step")) words.insert(words.end(), {"--step", line.Text("step")});
  if (line.Has("state")) words.push_back("--state");
  if (line.Has("output")) words.insert(words.end(), {"--destination", line.Text("output")});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  // Its messages and its exit code are this command's.
  ::execv(program->c_str(), arguments.data());
  return session->Fail(ErrnoStatus(errno, "cannot run " + *program));
}

}  // namespace oom
