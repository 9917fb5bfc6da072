// train, submit, plan, watch: what begins a job or follows it.

#include <filesystem>
#include <utility>

#include "client/commands.h"
#include "client/embedded_daemon.h"
#include "client/exit_code.h"
#include "client/follow.h"
#include "client/geometry.h"
#include "client/job_view.h"
#include "client/job_yaml.h"
#include "client/plan_view.h"
#include "client/request_id.h"
#include "runtime/base/clock.h"

namespace oom {
namespace {

constexpr double kDaemonStartSeconds = 30.0;

// The name of a job whose file gives none: the last folder of its output, as far as a name allows
// it.
std::string NameFromOutput(const std::string& output) {
  std::string name;
  for (char c : std::filesystem::path(output).filename().string()) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    const bool letter = c >= 'a' && c <= 'z';
    const bool digit = c >= '0' && c <= '9';
    if (letter || (digit && !name.empty())) {
      name += c;
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  name.resize(std::min<size_t>(name.size(), 63));
  while (name.ends_with('-')) name.pop_back();
  return name.empty() ? "job" : name;
}

Result<v1::CreateJobRequest> ReadRequest(Session* session) {
  const CommandLine& line = session->line();
  OOM_ASSIGN_OR_RETURN(v1::JobSpec spec, ReadJobFile(line.arguments.front()));
  v1::CreateJobRequest request;
  if (line.Has("name")) {
    spec.set_name(line.Text("name"));
    request.set_job_id(spec.name());
  }
  if (spec.name().empty()) spec.set_name(NameFromOutput(spec.output()));
  *request.mutable_job()->mutable_spec() = std::move(spec);
  request.set_request_id(line.Text("request-id", RandomRequestId()));
  return request;
}

Result<v1::Job> Submit(Session* session) {
  OOM_ASSIGN_OR_RETURN(const v1::CreateJobRequest request, ReadRequest(session));
  OOM_ASSIGN_OR_RETURN(OomClient * client, session->Client());
  Result<v1::Job> job = client->CreateJob(request);
  if (job.ok()) return job;
  // The job may be there: the same request again gives it back, or makes it.
  const Code code = job.status().code();
  if (code == Code::kDeadlineExceeded || code == Code::kUnavailable) {
    session->output().ErrorText("to repeat this submission safely: --request-id " +
                                request.request_id());
  }
  return job;
}

Status WaitUntilServing(Session* session, EmbeddedDaemon* daemon) {
  OOM_ASSIGN_OR_RETURN(const std::unique_ptr<OomClient> client,
                       OomClient::Create({.address = daemon->socket_path(),
                                          .timeout_seconds = kDaemonStartSeconds,
                                          .attempts = 1}));
  while (true) {
    OOM_RETURN_IF_ERROR(daemon->CheckAlive());
    const Result<bool> serving = client->IsServing("");
    if (serving.ok() && *serving) break;
    if (!serving.ok() && serving.status().code() != Code::kUnavailable) return serving.status();
    client->Backoff(1);
  }
  session->UseHost(daemon->socket_path());
  return Status::Ok();
}

// Options of `oom plan` that describe a geometry; a job file says these things itself.
Status CheckOptionsOfJobFile(const CommandLine& line) {
  for (const OptionRow& row : line.command->options) {
    if (row.name == "name" || !line.Has(row.name)) continue;
    const std::string flag(row.flags);
    return Status(Code::kInvalidArgument, flag + " is for a geometry; a job file says it itself")
        .WithField(flag);
  }
  return Status::Ok();
}

// Asks oomd for the plan that `request` wants, and prints it.
int ShowPlan(Session* session, const v1::CreateJobRequest& request) {
  const Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  const Result<v1::Job> job = (*client)->CreateJob(request);
  if (!job.ok()) return session->Fail(job.status());
  WritePlan(*job, &session->output());
  return kExitOk;
}

std::string HostFlag(Session* session) {
  return session->line().Has("host") ? " --host " + session->line().Text("host") : "";
}

int Follow(Session* session, Interrupt* interrupt, const std::string& name, bool train) {
  return FollowJob(session, interrupt,
                   {.name = name,
                    .interval_seconds = session->line().Seconds("progress-interval", 10.0),
                    .may_cancel = train,
                    .embedded = train && session->line().Has("embedded"),
                    .host_flag = HostFlag(session)});
}

}  // namespace

int RunTrain(Session* session) {
  const CommandLine& line = session->line();
  if (line.Has("state-dir") && !line.Has("embedded")) {
    session->output().ErrorText("oom: --state-dir needs --embedded");
    return kExitUsage;
  }
  // A wrong job file is said before a daemon starts.
  const Result<v1::JobSpec> spec = ReadJobFile(line.arguments.front());
  if (!spec.ok()) return session->Fail(spec.status());
  std::unique_ptr<EmbeddedDaemon> daemon;
  if (line.Has("embedded")) {
    Result<std::unique_ptr<EmbeddedDaemon>> started = EmbeddedDaemon::Start(line.Text("state-dir"));
    if (!started.ok()) return session->Fail(started.status());
    daemon = std::move(started).value();
  }
  Interrupt interrupt;
  if (daemon != nullptr) {
    const Status ready = WaitUntilServing(session, daemon.get());
    if (!ready.ok()) return session->Fail(ready);
  }
  const Result<v1::Job> job = Submit(session);
  if (!job.ok()) return session->Fail(job.status());
  session->output().Message("submitted " + JobId(job->name()));
  const int code = Follow(session, &interrupt, job->name(), true);
  // An open connection would hold up the private daemon's end.
  if (daemon != nullptr) session->UseHost("");
  return code;
}

int RunSubmit(Session* session) {
  const Result<v1::Job> job = Submit(session);
  if (!job.ok()) return session->Fail(job.status());
  Output& output = session->output();
  if (output.is_table()) {
    output.Line(Printable(JobId(job->name())));
    output.Message("submitted; follow it with: oom watch " + JobId(job->name()) +
                   HostFlag(session));
  } else {
    WriteJob(*job, UnixSeconds(), &output);
  }
  return kExitOk;
}

int RunPlan(Session* session) {
  const CommandLine& line = session->line();
  if (MeansGeometry(line.arguments.front())) {
    const Result<std::unique_ptr<GeometryPlan>> plan = GeometryPlan::Create(line);
    if (!plan.ok()) return session->Fail(plan.status());
    return ShowPlan(session, (*plan)->request());
  }
  if (const Status fits = CheckOptionsOfJobFile(line); !fits.ok()) return session->Fail(fits);
  Result<v1::CreateJobRequest> request = ReadRequest(session);
  if (!request.ok()) return session->Fail(request.status());
  request->set_validate_only(true);
  return ShowPlan(session, *request);
}

int RunWatch(Session* session) {
  const CommandLine& line = session->line();
  Interrupt interrupt;
  std::string name;
  if (!line.arguments.empty()) {
    const Result<v1::Job> job = session->FindJob(line.arguments.front());
    if (!job.ok()) return session->Fail(job.status());
    name = job->name();
    const bool events = line.Has("resume-token") || session->output().form() == OutputForm::kJson ||
                        session->output().form() == OutputForm::kJsonl;
    if (!events) return Follow(session, &interrupt, name, false);
  }
  const Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  OomClient* const watched = *client;
  interrupt.OnInterrupt([watched] { watched->CancelStreams(); });
  v1::JobState last = v1::JOB_STATE_UNSPECIFIED;
  const Status status = WatchEvents(
      watched,
      {.name = name,
       .resume_token = line.Text("resume-token"),
       .on_lost = [&](const Status&) { session->output().Message("lost oomd; waiting"); }},
      [&](const v1::JobEvent& event) {
        WriteEvent(event, &session->output());
        if (event.kind() == v1::JOB_EVENT_KIND_BOOKMARK) return true;
        last = event.job().state();
        return name.empty() || !IsTerminal(last);
      });
  interrupt.OnInterrupt(nullptr);
  if (status.code() == Code::kCancelled) return kExitDetached;
  if (!status.ok()) return session->Fail(status);
  return ExitCodeOf(last);
}

}  // namespace oom
