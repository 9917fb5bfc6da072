// OomClient calls oomd over its Unix socket: deadlines, retries, and errors decoded into Status.
// gRPC stays behind it: oom_client.cc alone includes it.
//
// Every call returns the server's code with ErrorInfo.reason as reason() and the first field
// violation as field(); all violations are in the message. UNAVAILABLE is tried `attempts` times
// (0.1 to 1 s apart) within the deadline; every change is safe to repeat: CreateJob by its
// request_id, CancelJob by looking first. kPermissionDenied also when the socket may not be opened
// or belongs to another user. Thread-safe. CancelStreams may be called while another thread reads a
// stream.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "oom/v1/job.pb.h"
#include "oom/v1/node.pb.h"
#include "runtime/base/status.h"

namespace oom {

class OomClient {
 public:
  struct Options {
    // A path, or "unix:" and a path; empty: DefaultAddress().
    std::string address;
    // For everything this client does, from Create on; then kDeadlineExceeded. 0: streams have
    // none, a call with its retries 10 s (60 s for CreateJob, which plans, and an hour for
    // CheckpointJob, which returns when the checkpoint is durable).
    double timeout_seconds = 0.0;
    int attempts = 4;
  };

  // OOM_HOST, else $XDG_RUNTIME_DIR/oomd.sock, else $XDG_STATE_HOME/oom/oomd.sock, else
  // ~/.local/state/oom/oomd.sock: where oomd listens by default.
  static std::string DefaultAddress();

  // Does not connect yet. Fails with kInvalidArgument on an address that is not a Unix socket's.
  static Result<std::unique_ptr<OomClient>> Create(const Options& options);
  ~OomClient();
  OomClient(const OomClient&) = delete;
  OomClient& operator=(const OomClient&) = delete;

  // The socket's path.
  const std::string& path() const;

  Result<v1::Job> CreateJob(const v1::CreateJobRequest& request);
  Result<v1::Job> GetJob(const std::string& name);
  // One page.
  Result<v1::ListJobsResponse> ListJobs(const v1::ListJobsRequest& request);
  Result<v1::Job> CancelJob(const v1::CancelJobRequest& request);
  Result<v1::Job> SuspendJob(const std::string& name);
  Result<v1::Job> ResumeJob(const std::string& name);
  Result<v1::CheckpointJobResponse> CheckpointJob(const std::string& name);
  Result<v1::Node> GetNode();
  // grpc.health.v1: whether `service` ("", "readiness", "liveness") serves.
  Result<bool> IsServing(const std::string& service);

  // Call `on_event` for each event until it returns false, the server ends the stream, or
  // CancelStreams. kOk when `on_event` ended it or the server did; kCancelled by CancelStreams. No
  // retries.
  Status WatchJobs(const v1::WatchJobsRequest& request,
                   const std::function<bool(const v1::JobEvent&)>& on_event);
  Status StreamLogs(const v1::StreamLogsRequest& request,
                    const std::function<bool(const v1::LogChunk&)>& on_chunk);

  // Ends running streams with kCancelled, and those that start before AllowStreams.
  void CancelStreams();
  void AllowStreams();

  // Waits before attempt `attempt` (from 1) as a retry does. Returns false when streams are
  // cancelled.
  bool Backoff(int attempt);

 private:
  struct Impl;
  explicit OomClient(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
