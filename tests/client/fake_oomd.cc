#include "tests/client/fake_oomd.h"

#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace oom {
namespace {

bool IsTerminalState(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

}  // namespace

class FakeOomd::Jobs : public v1::JobService::Service {
 public:
  explicit Jobs(FakeOomd* fake) : fake_(*fake) {}

  grpc::Status CreateJob(grpc::ServerContext*, const v1::CreateJobRequest* request,
                         v1::Job* job) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    *job = request->job();
    job->set_name("jobs/" + (request->job_id().empty() ? job->spec().name() : request->job_id()));
    job->set_state(v1::JOB_STATE_QUEUED);
    std::function<void(const v1::Job&)> callback;
    {
      MutexLock lock(fake_.mutex_);
      fake_.created_.push_back(*request);
      *job->mutable_plan() = fake_.plan_;
      if (request->validate_only()) return grpc::Status::OK;
      for (const v1::Job& other : fake_.jobs_) {
        if (other.name() == job->name()) {
          return ErrorWithDetails(grpc::StatusCode::ALREADY_EXISTS,
                                  job->name() + " is there already", "JOB_EXISTS");
        }
      }
      fake_.PublishLocked(*job, v1::JOB_EVENT_KIND_TRANSITION);
      callback = fake_.on_create_;
    }
    if (callback) callback(*job);
    return grpc::Status::OK;
  }

  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                      v1::Job* job) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    MutexLock lock(fake_.mutex_);
    v1::Job* found = nullptr;
    if (grpc::Status status = fake_.FindLocked(request->name(), &found); !status.ok())
      return status;
    *job = *found;
    return grpc::Status::OK;
  }

  // Two jobs a page, so that every listing pages.
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    MutexLock lock(fake_.mutex_);
    size_t index = request->page_token().empty() ? 0 : std::stoul(request->page_token());
    for (; index < fake_.jobs_.size() && response->jobs_size() < 2; ++index) {
      const v1::Job& job = fake_.jobs_[index];
      const auto& states = request->states();
      if (states.empty() || std::find(states.begin(), states.end(), job.state()) != states.end()) {
        *response->add_jobs() = job;
      }
    }
    if (index < fake_.jobs_.size()) response->set_next_page_token(std::to_string(index));
    return grpc::Status::OK;
  }

  grpc::Status CancelJob(grpc::ServerContext*, const v1::CancelJobRequest* request,
                         v1::Job* job) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    MutexLock lock(fake_.mutex_);
    fake_.cancels_.push_back(*request);
    return Change(request->name(), v1::JOB_STATE_CANCELLED, "USER_CANCEL", job);
  }

  grpc::Status SuspendJob(grpc::ServerContext*, const v1::SuspendJobRequest* request,
                          v1::Job* job) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    MutexLock lock(fake_.mutex_);
    return Change(request->name(), v1::JOB_STATE_SUSPENDED, "", job);
  }

  grpc::Status ResumeJob(grpc::ServerContext*, const v1::ResumeJobRequest* request,
                         v1::Job* job) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    MutexLock lock(fake_.mutex_);
    return Change(request->name(), v1::JOB_STATE_QUEUED, "", job);
  }

  grpc::Status CheckpointJob(grpc::ServerContext*, const v1::CheckpointJobRequest* request,
                             v1::CheckpointJobResponse* response) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    MutexLock lock(fake_.mutex_);
    v1::Job* found = nullptr;
    if (grpc::Status status = fake_.FindLocked(request->name(), &found); !status.ok())
      return status;
    response->set_durable_step(found->step());
    response->set_path(found->spec().output() + "/checkpoints/step-00000012");
    return grpc::Status::OK;
  }

  grpc::Status WatchJobs(grpc::ServerContext* context, const v1::WatchJobsRequest* request,
                         grpc::ServerWriter<v1::JobEvent>* writer) override {
    MutexLock lock(fake_.mutex_);
    fake_.watches_.push_back(*request);
    if (!request->name().empty()) {
      v1::Job* found = nullptr;
      grpc::Status status = fake_.FindLocked(request->name(), &found);
      if (!status.ok()) return status;
    }
    int sent = 0;
    // True to go on.
    const auto send = [&](const v1::JobEvent& event) OOM_REQUIRES(fake_.mutex_) {
      if (!fake_.watch_errors_.empty() && sent >= fake_.watch_error_events_) return false;
      ++sent;
      return writer->Write(event);
    };
    const auto end = [&]() OOM_REQUIRES(fake_.mutex_) {
      if (fake_.watch_errors_.empty() || sent < fake_.watch_error_events_) return grpc::Status::OK;
      const grpc::Status error = fake_.watch_errors_.front();
      fake_.watch_errors_.pop_front();
      return error;
    };
    size_t next = request->resume_token().empty() ? fake_.events_.size()
                                                  : std::stoul(request->resume_token());
    if (request->resume_token().empty()) {
      for (const v1::Job& job : fake_.jobs_) {
        if (!request->name().empty() && job.name() != request->name()) continue;
        v1::JobEvent event;
        event.set_kind(v1::JOB_EVENT_KIND_SNAPSHOT);
        event.set_resume_token(std::to_string(next));
        *event.mutable_job() = job;
        if (!send(event)) return end();
      }
      v1::JobEvent bookmark;
      bookmark.set_kind(v1::JOB_EVENT_KIND_BOOKMARK);
      bookmark.set_resume_token(std::to_string(next));
      if (!send(bookmark)) return end();
    }
    while (!context->IsCancelled()) {
      if (fake_.stopping_) return {grpc::StatusCode::UNAVAILABLE, "oomd is stopping"};
      if (!fake_.watch_errors_.empty() && sent >= fake_.watch_error_events_) return end();
      if (next == fake_.events_.size()) {
        fake_.changed_.WaitFor(fake_.mutex_, std::chrono::milliseconds(10));
        continue;
      }
      const v1::JobEvent& event = fake_.events_[next++];
      if (!request->name().empty() && event.job().name() != request->name()) continue;
      if (!send(event)) return end();
    }
    return grpc::Status::CANCELLED;
  }

  grpc::Status StreamLogs(grpc::ServerContext* context, const v1::StreamLogsRequest* request,
                          grpc::ServerWriter<v1::LogChunk>* writer) override {
    MutexLock lock(fake_.mutex_);
    std::vector<v1::LogChunk> chosen;
    const auto wanted = [&](const v1::LogChunk& chunk) {
      const auto& ranks = request->ranks();
      return ranks.empty() || std::find(ranks.begin(), ranks.end(), chunk.rank()) != ranks.end();
    };
    size_t index = 0;
    for (; index < fake_.logs_.size(); ++index) {
      if (wanted(fake_.logs_[index])) chosen.push_back(fake_.logs_[index]);
    }
    const size_t tail = static_cast<size_t>(request->tail_lines());
    if (tail > 0 && chosen.size() > tail) chosen.erase(chosen.begin(), chosen.end() - tail);
    int sent = 0;
    for (const v1::LogChunk& chunk : chosen) {
      if (!fake_.log_errors_.empty() && sent++ >= fake_.log_error_lines_) {
        const grpc::Status error = fake_.log_errors_.front();
        fake_.log_errors_.pop_front();
        return error;
      }
      writer->Write(chunk);
    }
    while (request->follow() && !context->IsCancelled() && !fake_.stopping_) {
      for (; index < fake_.logs_.size(); ++index) {
        if (wanted(fake_.logs_[index])) writer->Write(fake_.logs_[index]);
      }
      v1::Job* job = nullptr;
      if (!fake_.FindLocked(request->name(), &job).ok() || IsTerminalState(job->state())) break;
      fake_.changed_.WaitFor(fake_.mutex_, std::chrono::milliseconds(10));
    }
    return grpc::Status::OK;
  }

 private:
  grpc::Status Change(const std::string& name, v1::JobState state, const std::string& reason,
                      v1::Job* job) OOM_REQUIRES(fake_.mutex_) {
    v1::Job* found = nullptr;
    if (grpc::Status status = fake_.FindLocked(name, &found); !status.ok()) return status;
    if (IsTerminalState(found->state())) {
      return ErrorWithDetails(grpc::StatusCode::FAILED_PRECONDITION, name + " has ended",
                              "JOB_TERMINAL");
    }
    *job = *found;
    job->set_state(state);
    job->set_reason(reason);
    fake_.PublishLocked(*job, v1::JOB_EVENT_KIND_TRANSITION);
    return grpc::Status::OK;
  }

  FakeOomd& fake_;
};

class FakeOomd::Nodes : public v1::NodeService::Service {
 public:
  explicit Nodes(FakeOomd* fake) : fake_(*fake) {}

  grpc::Status GetNode(grpc::ServerContext*, const v1::GetNodeRequest*, v1::Node* node) override {
    if (grpc::Status status = fake_.Begin(); !status.ok()) return status;
    node->set_name("fake-node");
    node->set_version("9.8.7");
    node->set_cpu_count(4);
    node->set_memory_limit_source("machine");
    v1::NumaNode* numa = node->add_numa_nodes();
    numa->set_pool_capacity_bytes(int64_t{8} << 30);
    numa->set_page_kind("4KiB");
    node->set_hugepage_hint("sudo sysctl -w vm.nr_hugepages=2048");
    node->set_gpu_problem("GPU 1 does not answer");
    v1::Device* device = node->add_devices();
    device->set_kind("cpu");
    device->set_name("cpu 0");
    device->set_job("jobs/tiny");
    return grpc::Status::OK;
  }

 private:
  FakeOomd& fake_;
};

FakeOomd::FakeOomd(const std::string& socket_path, Stored stored)
    : jobs_(std::move(stored.jobs)), events_(std::move(stored.events)) {
  job_service_ = std::make_unique<Jobs>(this);
  node_service_ = std::make_unique<Nodes>(this);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials());
  builder.RegisterService(job_service_.get());
  builder.RegisterService(node_service_.get());
  server_ = builder.BuildAndStart();
  SetReady(true);
}

FakeOomd::~FakeOomd() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
}

grpc::Status FakeOomd::Begin() {
  MutexLock lock(mutex_);
  ++unary_calls_;
  if (errors_.empty()) return grpc::Status::OK;
  const grpc::Status error = errors_.front();
  errors_.pop_front();
  return error;
}

grpc::Status FakeOomd::FindLocked(const std::string& name, v1::Job** job) {
  for (v1::Job& candidate : jobs_) {
    if (candidate.name() != name) continue;
    *job = &candidate;
    return grpc::Status::OK;
  }
  return ErrorWithDetails(grpc::StatusCode::NOT_FOUND, "there is no " + name, "JOB_NOT_FOUND");
}

void FakeOomd::PublishLocked(const v1::Job& job, v1::JobEventKind kind) {
  v1::Job* found = nullptr;
  if (FindLocked(job.name(), &found).ok()) {
    *found = job;
  } else {
    jobs_.push_back(job);
  }
  v1::JobEvent event;
  event.set_kind(kind);
  event.set_sequence(static_cast<int64_t>(events_.size()) + 1);
  event.set_resume_token(std::to_string(event.sequence()));
  *event.mutable_job() = job;
  event.mutable_time()->set_seconds(1700000000 + event.sequence());
  events_.push_back(event);
  changed_.NotifyAll();
}

void FakeOomd::Publish(const v1::Job& job, v1::JobEventKind kind) {
  MutexLock lock(mutex_);
  PublishLocked(job, kind);
}

void FakeOomd::AddLog(const v1::LogChunk& chunk) {
  MutexLock lock(mutex_);
  logs_.push_back(chunk);
  changed_.NotifyAll();
}

void FakeOomd::FailNext(std::vector<grpc::Status> errors) {
  MutexLock lock(mutex_);
  errors_.assign(errors.begin(), errors.end());
}

void FakeOomd::BreakWatches(int events, std::vector<grpc::Status> errors) {
  MutexLock lock(mutex_);
  watch_error_events_ = events;
  watch_errors_.assign(errors.begin(), errors.end());
}

void FakeOomd::BreakLogs(int lines, grpc::Status error) {
  MutexLock lock(mutex_);
  log_error_lines_ = lines;
  log_errors_.assign(1, std::move(error));
}

void FakeOomd::OnCreate(std::function<void(const v1::Job&)> callback) {
  MutexLock lock(mutex_);
  on_create_ = std::move(callback);
}

void FakeOomd::SetPlan(const v1::Plan& plan) {
  MutexLock lock(mutex_);
  plan_ = plan;
}

void FakeOomd::SetReady(bool ready) {
  server_->GetHealthCheckService()->SetServingStatus("readiness", ready);
}

FakeOomd::Stored FakeOomd::Store() const {
  MutexLock lock(mutex_);
  return {jobs_, events_};
}

v1::Job FakeOomd::Find(const std::string& name) const {
  MutexLock lock(mutex_);
  for (const v1::Job& job : jobs_) {
    if (job.name() == name) return job;
  }
  return v1::Job();
}

std::vector<v1::CreateJobRequest> FakeOomd::created() const {
  MutexLock lock(mutex_);
  return created_;
}

std::vector<v1::CancelJobRequest> FakeOomd::cancels() const {
  MutexLock lock(mutex_);
  return cancels_;
}

std::vector<v1::WatchJobsRequest> FakeOomd::watches() const {
  MutexLock lock(mutex_);
  return watches_;
}

int FakeOomd::unary_calls() const {
  MutexLock lock(mutex_);
  return unary_calls_;
}

grpc::Status ErrorWithDetails(grpc::StatusCode code, const std::string& message,
                              const std::string& reason, const std::string& field) {
  google::rpc::Status details;
  details.set_code(static_cast<int>(code));
  details.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("oomd");
  details.add_details()->PackFrom(info);
  if (!field.empty()) {
    google::rpc::BadRequest bad;
    auto* violation = bad.add_field_violations();
    violation->set_field(field);
    violation->set_description(message);
    details.add_details()->PackFrom(bad);
  }
  return {code, message, details.SerializeAsString()};
}

}  // namespace oom
