#include "client/oom_client.h"

#include <google/protobuf/wrappers.pb.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <set>
#include <utility>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "oom/v1/job.grpc.pb.h"
#include "oom/v1/node.grpc.pb.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"

namespace oom {
namespace {

using Clock = std::chrono::system_clock;

constexpr double kUnarySeconds = 10.0;
constexpr double kPlanSeconds = 60.0;
constexpr double kCheckpointSeconds = 3600.0;
constexpr std::chrono::milliseconds kFirstBackoff{100};
constexpr std::chrono::milliseconds kLongestBackoff{1000};
// What one message may hold; oomd's own limit.
constexpr int kMessageLimitBytes = 4 << 20;

Code CodeOf(grpc::StatusCode code) {
  switch (code) {
    // The codes that no caller branches on.
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::UNIMPLEMENTED:
      return Code::kInternal;
    default:
      return static_cast<Code>(code);
  }
}

void AddViolation(const std::string& name, const std::string& description, std::string* message) {
  const std::string text = name.empty() ? description : name + ": " + description;
  if (!description.empty() && message->find(description) == std::string::npos) {
    *message += (message->empty() ? "" : "\n  ") + text;
  }
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return Status::Ok();
  std::string message = status.error_message();
  std::string reason;
  std::string field;
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details()) {
      google::rpc::ErrorInfo info;
      google::rpc::BadRequest bad;
      google::rpc::PreconditionFailure precondition;
      google::rpc::QuotaFailure quota;
      if (detail.UnpackTo(&info)) {
        reason = info.reason();
      } else if (detail.UnpackTo(&bad)) {
        for (const auto& violation : bad.field_violations()) {
          if (field.empty()) field = violation.field();
          AddViolation(violation.field(), violation.description(), &message);
        }
      } else if (detail.UnpackTo(&precondition)) {
        for (const auto& violation : precondition.violations()) {
          AddViolation(violation.subject(), violation.description(), &message);
        }
      } else if (detail.UnpackTo(&quota)) {
        for (const auto& violation : quota.violations()) {
          AddViolation(violation.subject(), violation.description(), &message);
        }
      }
    }
  }
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    message = "oomd does not know this call (is it older than oom?): " + message;
  }
  return Status(CodeOf(status.error_code()), message)
      .WithReason(std::move(reason))
      .WithField(std::move(field));
}

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Why nobody can be reached at `path`, as a message that helps; kOk when somebody listens.
Status Probe(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "cannot make a socket");
  struct stat info {};
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    return Status::Ok();
  }
  const int error = errno;
  if (error == EACCES || error == EPERM) {
    std::string owner;
    if (exists) owner = "; it belongs to uid " + std::to_string(info.st_uid);
    return Status(Code::kPermissionDenied, "may not open the socket " + path + owner);
  }
  const char* why = !exists ? "there is no such socket" : "nobody listens there";
  return Status(Code::kUnavailable, "no oomd at " + path + ": " + why +
                                        "; start one with `oomd`, or name another with --host");
}

}  // namespace

struct OomClient::Impl {
  Options options;
  // Of everything, from Options::timeout_seconds.
  bool has_deadline = false;
  Clock::time_point deadline;
  std::string path;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::JobService::Stub> jobs;
  std::unique_ptr<v1::NodeService::Stub> nodes;
  Mutex mutex;
  CondVar cancelled;
  std::set<grpc::ClientContext*> streams OOM_GUARDED_BY(mutex);
  bool cancel_streams OOM_GUARDED_BY(mutex) = false;

  static Clock::time_point After(double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  static std::chrono::milliseconds BackoffTime(int attempt) {
    return std::min(kFirstBackoff * (1 << std::min(attempt - 1, 10)), kLongestBackoff);
  }

  Status CheckDeadline() const {
    if (!has_deadline || Clock::now() < deadline) return Status::Ok();
    return Status(Code::kDeadlineExceeded, "no answer from oomd in time");
  }

  // Returns false when CancelStreams came.
  bool Wait(std::chrono::milliseconds time) {
    const auto until = std::chrono::steady_clock::now() + time;
    MutexLock lock(mutex);
    while (!cancel_streams && std::chrono::steady_clock::now() < until) {
      cancelled.WaitFor(mutex, until - std::chrono::steady_clock::now());
    }
    return !cancel_streams;
  }

  // Calls `call(context)` until it is not UNAVAILABLE, or attempts or time run out. `before_retry`
  // may end it early by returning true.
  Status Retry(double default_seconds,
               const std::function<grpc::Status(grpc::ClientContext*)>& call,
               const std::function<bool()>& before_retry = nullptr) {
    const Clock::time_point deadline = has_deadline ? this->deadline : After(default_seconds);
    OOM_RETURN_IF_ERROR(CheckDeadline());
    Status status;
    for (int attempt = 1;; ++attempt) {
      status = Probe(path);
      if (status.ok()) {
        grpc::ClientContext context;
        context.set_deadline(deadline);
        status = FromGrpc(call(&context));
      }
      if (status.code() != Code::kUnavailable || attempt >= options.attempts) return status;
      if (Clock::now() + BackoffTime(attempt) >= deadline) return status;
      if (!Wait(BackoffTime(attempt))) return status;
      if (before_retry && before_retry()) return Status::Ok();
    }
  }

  template <class Request, class Response>
  using Method = grpc::Status (v1::JobService::Stub::*)(grpc::ClientContext*, const Request&,
                                                        Response*);

  template <class Request, class Response>
  Result<Response> Call(Method<Request, Response> method, const Request& request,
                        double default_seconds = kUnarySeconds) {
    Response response;
    OOM_RETURN_IF_ERROR(Retry(default_seconds, [&](grpc::ClientContext* context) {
      return (jobs.get()->*method)(context, request, &response);
    }));
    return response;
  }

  // Reads what `open(context)` returns.
  template <class Message, class Open>
  Status ReadStream(const Open& open, const std::function<bool(const Message&)>& on_message) {
    OOM_RETURN_IF_ERROR(CheckDeadline());
    OOM_RETURN_IF_ERROR(Probe(path));
    grpc::ClientContext context;
    if (has_deadline) context.set_deadline(deadline);
    {
      MutexLock lock(mutex);
      if (cancel_streams) return Status(Code::kCancelled, "interrupted");
      streams.insert(&context);
    }
    Message message;
    auto reader = open(&context);
    bool stopped = false;
    while (!stopped && reader->Read(&message)) {
      if (on_message(message)) continue;
      stopped = true;
      context.TryCancel();
    }
    const Status status = FromGrpc(reader->Finish());
    MutexLock lock(mutex);
    streams.erase(&context);
    return stopped ? Status::Ok() : status;
  }
};

OomClient::OomClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OomClient::~OomClient() = default;

std::string OomClient::DefaultAddress() {
  if (const std::string host = Environment("OOM_HOST"); !host.empty()) return host;
  if (const std::string run = Environment("XDG_RUNTIME_DIR"); !run.empty())
    return run + "/oomd.sock";
  if (const std::string state = Environment("XDG_STATE_HOME"); !state.empty()) {
    return state + "/oom/oomd.sock";
  }
  return Environment("HOME") + "/.local/state/oom/oomd.sock";
}

Result<std::unique_ptr<OomClient>> OomClient::Create(const Options& options) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->has_deadline = options.timeout_seconds > 0;
  if (impl->has_deadline) impl->deadline = Impl::After(options.timeout_seconds);
  impl->path = options.address.empty() ? DefaultAddress() : options.address;
  if (impl->path.starts_with("unix:")) impl->path.erase(0, 5);
  while (impl->path.starts_with("//")) impl->path.erase(0, 1);
  if (impl->path.find('/') == std::string::npos) {
    return Status(Code::kInvalidArgument,
                  "'" + impl->path + "' is not the path of a Unix socket (TCP is not supported)")
        .WithField("--host");
  }
  if (impl->path.size() >= sizeof(sockaddr_un::sun_path)) {
    return Status(Code::kInvalidArgument,
                  "the socket's path is longer than 107 bytes: " + impl->path)
        .WithField("--host");
  }
  grpc::ChannelArguments arguments;
  // This class retries; the library below would hide attempts.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // Despite its name the longest that one connection attempt may take: a busy oomd gets its time.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // Clients of one process that name different sockets never share a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(4 * kMessageLimitBytes);
  impl->channel = grpc::CreateCustomChannel("unix:" + impl->path,
                                            grpc::InsecureChannelCredentials(), arguments);
  impl->jobs = v1::JobService::NewStub(impl->channel);
  impl->nodes = v1::NodeService::NewStub(impl->channel);
  return std::unique_ptr<OomClient>(new OomClient(std::move(impl)));
}

const std::string& OomClient::path() const { return impl_->path; }

Result<v1::Job> OomClient::CreateJob(const v1::CreateJobRequest& request) {
  return impl_->Call<v1::CreateJobRequest, v1::Job>(&v1::JobService::Stub::CreateJob, request,
                                                    kPlanSeconds);
}

Result<v1::Job> OomClient::GetJob(const std::string& name) {
  v1::GetJobRequest request;
  request.set_name(name);
  return impl_->Call<v1::GetJobRequest, v1::Job>(&v1::JobService::Stub::GetJob, request);
}

Result<v1::ListJobsResponse> OomClient::ListJobs(const v1::ListJobsRequest& request) {
  return impl_->Call<v1::ListJobsRequest, v1::ListJobsResponse>(&v1::JobService::Stub::ListJobs,
                                                                request);
}

Result<v1::Job> OomClient::CancelJob(const v1::CancelJobRequest& request) {
  v1::Job job;
  // A second cancel means "now" to oomd, so one whose answer was lost is not sent again blindly.
  const auto already_stopping = [&] {
    const Result<v1::Job> seen = GetJob(request.name());
    if (!seen.ok()) return false;
    job = *seen;
    return request.mode() != v1::CANCEL_MODE_NOW &&
           (job.state() == v1::JOB_STATE_STOPPING || job.state() == v1::JOB_STATE_CANCELLED);
  };
  OOM_RETURN_IF_ERROR(impl_->Retry(
      kUnarySeconds,
      [&](grpc::ClientContext* context) { return impl_->jobs->CancelJob(context, request, &job); },
      already_stopping));
  return job;
}

Result<v1::Job> OomClient::SuspendJob(const std::string& name) {
  v1::SuspendJobRequest request;
  request.set_name(name);
  return impl_->Call<v1::SuspendJobRequest, v1::Job>(&v1::JobService::Stub::SuspendJob, request);
}

Result<v1::Job> OomClient::ResumeJob(const std::string& name) {
  v1::ResumeJobRequest request;
  request.set_name(name);
  return impl_->Call<v1::ResumeJobRequest, v1::Job>(&v1::JobService::Stub::ResumeJob, request);
}

Result<v1::CheckpointJobResponse> OomClient::CheckpointJob(const std::string& name) {
  v1::CheckpointJobRequest request;
  request.set_name(name);
  return impl_->Call<v1::CheckpointJobRequest, v1::CheckpointJobResponse>(
      &v1::JobService::Stub::CheckpointJob, request, kCheckpointSeconds);
}

Result<v1::Node> OomClient::GetNode() {
  v1::Node node;
  OOM_RETURN_IF_ERROR(impl_->Retry(kUnarySeconds, [&](grpc::ClientContext* context) {
    return impl_->nodes->GetNode(context, v1::GetNodeRequest(), &node);
  }));
  return node;
}

Result<bool> OomClient::IsServing(const std::string& service) {
  // HealthCheckRequest is one string with number 1 and HealthCheckResponse one enum with number 1,
  // which is how these two wrappers look on the wire; Debian ships no generated code for the health
  // service.
  google::protobuf::StringValue request;
  google::protobuf::Int32Value response;
  constexpr int kServing = 1;
  request.set_value(service);
  grpc::TemplatedGenericStub<google::protobuf::StringValue, google::protobuf::Int32Value> stub(
      impl_->channel);
  OOM_RETURN_IF_ERROR(impl_->Retry(kUnarySeconds, [&](grpc::ClientContext* context) {
    std::promise<grpc::Status> done;
    stub.UnaryCall(context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                   &response, [&done](grpc::Status status) { done.set_value(std::move(status)); });
    return done.get_future().get();
  }));
  return response.value() == kServing;
}

Status OomClient::WatchJobs(const v1::WatchJobsRequest& request,
                            const std::function<bool(const v1::JobEvent&)>& on_event) {
  return impl_->ReadStream<v1::JobEvent>(
      [&](grpc::ClientContext* context) { return impl_->jobs->WatchJobs(context, request); },
      on_event);
}

Status OomClient::StreamLogs(const v1::StreamLogsRequest& request,
                             const std::function<bool(const v1::LogChunk&)>& on_chunk) {
  return impl_->ReadStream<v1::LogChunk>(
      [&](grpc::ClientContext* context) { return impl_->jobs->StreamLogs(context, request); },
      on_chunk);
}

void OomClient::CancelStreams() {
  MutexLock lock(impl_->mutex);
  impl_->cancel_streams = true;
  for (grpc::ClientContext* context : impl_->streams) context->TryCancel();
  impl_->cancelled.NotifyAll();
}

void OomClient::AllowStreams() {
  MutexLock lock(impl_->mutex);
  impl_->cancel_streams = false;
}

bool OomClient::Backoff(int attempt) { return impl_->Wait(Impl::BackoffTime(attempt)); }

}  // namespace oom
