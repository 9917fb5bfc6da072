#include <algorithm>
#include <utility>
#include <vector>

#include "client/commands.h"
#include "client/exit_code.h"
#include "runtime/base/file.h"

namespace oom {
namespace {

constexpr std::string_view kJobsPrefix = "jobs/";
constexpr size_t kLongestJobId = 63;

// [a-z]([a-z0-9-]{0,61}[a-z0-9])?
bool IsJobId(std::string_view id) {
  const auto lower = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  if (id.empty() || id.size() > kLongestJobId || !lower(id.front()) || id.back() == '-')
    return false;
  return std::all_of(id.begin(), id.end(),
                     [&](char c) { return lower(c) || digit(c) || c == '-'; });
}

}  // namespace

std::string JobResourceName(const std::string& argument) {
  return argument.starts_with(kJobsPrefix) ? argument : std::string(kJobsPrefix) + argument;
}

std::string JobId(const std::string& resource_name) {
  return resource_name.starts_with(kJobsPrefix) ? resource_name.substr(kJobsPrefix.size())
                                                : resource_name;
}

Result<OomClient*> Session::Client() {
  if (client_ == nullptr) {
    OOM_ASSIGN_OR_RETURN(client_, OomClient::Create({
                                      .address = host_.empty() ? line_.Text("host") : host_,
                                      .timeout_seconds = line_.Seconds("timeout"),
                                  }));
  }
  return client_.get();
}

void Session::UseHost(const std::string& host) {
  host_ = host;
  client_.reset();
}

int Session::Fail(const Status& status) {
  output_.Error(status);
  // What is wrong is the command line, not a job.
  if (status.field().starts_with("--")) return kExitUsage;
  return ExitCodeOf(status);
}

Result<v1::Job> Session::FindJob(const std::string& argument) {
  OOM_ASSIGN_OR_RETURN(OomClient * client, Client());
  if (!IsJobId(JobId(argument))) {
    return WithSuggestion(Status(Code::kNotFound, "'" + argument + "' is not the name of a job"),
                          argument);
  }
  Result<v1::Job> job = client->GetJob(JobResourceName(argument));
  if (!job.ok()) return WithSuggestion(job.status(), argument);
  return job;
}

Status Session::WithSuggestion(Status status, const std::string& argument) {
  if (status.code() != Code::kNotFound) return status;
  const Result<OomClient*> client = Client();
  if (!client.ok()) return status;
  std::vector<std::string> names;
  v1::ListJobsRequest request;
  request.set_page_size(1000);
  const Result<v1::ListJobsResponse> jobs = (*client)->ListJobs(request);
  if (jobs.ok()) {
    for (const v1::Job& job : jobs->jobs()) names.push_back(JobId(job.name()));
  }
  const std::string closest = ClosestName(JobId(argument), names);
  const std::string help =
      closest.empty() ? "; `oom ls` lists the jobs" : "; did you mean '" + closest + "'?";
  return Status(status.code(), status.message() + help).WithReason(status.reason());
}

}  // namespace oom
