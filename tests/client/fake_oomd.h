// FakeOomd serves oom.v1 on a Unix socket from memory: enough of oomd to exercise every command of
// `oom`, with errors, lost streams and state changes on demand. Thread-safe. Its destructor ends
// all streams.

#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oom/v1/job.grpc.pb.h"
#include "oom/v1/node.grpc.pb.h"
#include "runtime/base/mutex.h"

namespace oom {

class FakeOomd {
 public:
  // What oomd keeps on disk.
  struct Stored {
    std::vector<v1::Job> jobs;
    std::vector<v1::JobEvent> events;
  };

  explicit FakeOomd(const std::string& socket_path) : FakeOomd(socket_path, Stored()) {}
  // As after a restart.
  FakeOomd(const std::string& socket_path, Stored stored);
  ~FakeOomd();
  FakeOomd(const FakeOomd&) = delete;
  FakeOomd& operator=(const FakeOomd&) = delete;

  // Stores the job and tells watchers.
  void Publish(const v1::Job& job, v1::JobEventKind kind = v1::JOB_EVENT_KIND_TRANSITION);
  void AddLog(const v1::LogChunk& chunk);
  // The next unary calls fail like this, in order.
  void FailNext(std::vector<grpc::Status> errors);
  // Each watch ends with the first of these once it has sent `events` events.
  void BreakWatches(int events, std::vector<grpc::Status> errors);
  void BreakLogs(int lines, grpc::Status error);
  // Called with each created job, on a server thread, after it is published.
  void OnCreate(std::function<void(const v1::Job&)> callback);
  void SetPlan(const v1::Plan& plan);
  void SetReady(bool ready);

  Stored Store() const;
  v1::Job Find(const std::string& name) const;
  std::vector<v1::CreateJobRequest> created() const;
  std::vector<v1::CancelJobRequest> cancels() const;
  std::vector<v1::WatchJobsRequest> watches() const;
  int unary_calls() const;

 private:
  class Jobs;
  class Nodes;

  grpc::Status Begin();
  grpc::Status FindLocked(const std::string& name, v1::Job** job) OOM_REQUIRES(mutex_);
  void PublishLocked(const v1::Job& job, v1::JobEventKind kind) OOM_REQUIRES(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ OOM_GUARDED_BY(mutex_) = false;
  std::vector<v1::Job> jobs_ OOM_GUARDED_BY(mutex_);
  std::vector<v1::JobEvent> events_ OOM_GUARDED_BY(mutex_);
  std::vector<v1::LogChunk> logs_ OOM_GUARDED_BY(mutex_);
  std::deque<grpc::Status> errors_ OOM_GUARDED_BY(mutex_);
  std::deque<grpc::Status> watch_errors_ OOM_GUARDED_BY(mutex_);
  int watch_error_events_ OOM_GUARDED_BY(mutex_) = 0;
  std::deque<grpc::Status> log_errors_ OOM_GUARDED_BY(mutex_);
  int log_error_lines_ OOM_GUARDED_BY(mutex_) = 0;
  std::function<void(const v1::Job&)> on_create_ OOM_GUARDED_BY(mutex_);
  v1::Plan plan_ OOM_GUARDED_BY(mutex_);
  std::vector<v1::CreateJobRequest> created_ OOM_GUARDED_BY(mutex_);
  std::vector<v1::CancelJobRequest> cancels_ OOM_GUARDED_BY(mutex_);
  std::vector<v1::WatchJobsRequest> watches_ OOM_GUARDED_BY(mutex_);
  int unary_calls_ OOM_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<Jobs> job_service_;
  std::unique_ptr<Nodes> node_service_;
  std::unique_ptr<grpc::Server> server_;
};

// An error with one ErrorInfo, and a BadRequest when `field` is not empty.
grpc::Status ErrorWithDetails(grpc::StatusCode code, const std::string& message,
                              const std::string& reason, const std::string& field = "");

}  // namespace oom
