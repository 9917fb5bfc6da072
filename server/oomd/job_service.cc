#include <boost/asio/post.hpp>

#include "oom/v1/job.grpc.pb.h"
#include "planner/geometry.h"
#include "server/oomd/gpu_limits.h"
#include "server/oomd/job_streams.h"
#include "server/oomd/request_check.h"
#include "server/oomd/services.h"

namespace oom {
namespace {

// Below the client's receive limit of 4 MiB.
constexpr size_t kMaxPageBytes = 3 << 20;

class JobServiceImpl final : public v1::JobService::CallbackService {
 public:
  explicit JobServiceImpl(ServiceContext& services) : services_(services) {}

  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext* context,
                                      const v1::CreateJobRequest* request,
                                      v1::Job* response) override {
    const UnaryCall call(services_, *context, "CreateJob");
    if (!call.ok()) return call.reactor();
    if (const Status status = CheckCreate(*request); !status.ok()) {
      call.Finish(status);
      return call.reactor();
    }
    const uint64_t hash = PayloadHash(*request);
    services_.loop->Post([=, this](Controller& controller) {
      // A repeated call is answered without planning: the files it names may have changed since.
      Result<std::optional<v1::Job>> replay =
          controller.FindReplay(call.caller(), request->request_id(), hash);
      if (!replay.ok()) return call.Finish(replay.status());
      if (replay->has_value() && !request->validate_only()) {
        // The first call's commit comes with the next flush at the latest; CreateJob waits for it.
        Controller::NewJob again{
            .owner = call.caller(), .request_id = request->request_id(), .payload_hash = hash};
        return controller.CreateJob(
            std::move(again), [=](Result<v1::Job> job) { call.Finish(std::move(job), response); });
      }
      // After the planners have been joined nobody would answer.
      if (services_.stopping) return call.Finish(DaemonStopping());
      boost::asio::post(services_.planners,
                        [=, this] { PlanAndCreate(call, request, hash, response); });
    });
    return call.reactor();
  }

  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request, v1::Job* response) override {
    const UnaryCall call(services_, *context, "GetJob");
    if (!call.ok()) return call.reactor();
    if (const Status status = CheckJobName(request->name()); !status.ok()) {
      call.Finish(status);
    } else if (const JobView::JobPointer job = services_.view->Get(request->name())) {
      *response = *job;
      call.Finish(Status::Ok());
    } else {
      call.Finish(Status(Code::kNotFound, "there is no job \"" + request->name() + "\"")
                      .WithReason("JOB_NOT_FOUND")
                      .WithField(request->name()));
    }
    return call.reactor();
  }

  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override {
    const UnaryCall call(services_, *context, "ListJobs");
    if (!call.ok()) return call.reactor();
    const Result<Page> page = ParsePage(*request, call.caller(), services_.store_id);
    if (!page.ok()) {
      call.Finish(page.status());
      return call.reactor();
    }
    std::vector<v1::JobState> states;
    for (int state : request->states()) states.push_back(static_cast<v1::JobState>(state));
    const auto jobs =
        services_.view->List(page->after, static_cast<size_t>(page->size) + 1, states);
    size_t bytes = 0;
    int64_t last = 0;
    for (const auto& [order, job] : jobs) {
      v1::Job brief = Brief(*job);
      bytes += brief.ByteSizeLong();
      const bool full = response->jobs_size() == page->size ||
                        (response->jobs_size() > 0 && bytes > kMaxPageBytes);
      if (full) {
        response->set_next_page_token(
            MakePageToken(*request, call.caller(), services_.store_id, last));
        break;
      }
      *response->add_jobs() = std::move(brief);
      last = order;
    }
    call.Finish(Status::Ok());
    return call.reactor();
  }

  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const v1::CancelJobRequest* request,
                                      v1::Job* response) override {
    if (request->grace_seconds() < 0 || !(request->grace_seconds() <= 86400)) {
      const UnaryCall call(services_, *context, "CancelJob");
      if (call.ok()) {
        call.Finish(Status(Code::kInvalidArgument, "grace_seconds: is from 0 to 86400")
                        .WithReason("INVALID_INPUT")
                        .WithField("grace_seconds"));
      }
      return call.reactor();
    }
    return Change(*context, "CancelJob", request->name(), response,
                  [request](Controller& controller, Controller::Reply reply) {
                    controller.CancelJob(*request, std::move(reply));
                  });
  }

  grpc::ServerUnaryReactor* SuspendJob(grpc::CallbackServerContext* context,
                                       const v1::SuspendJobRequest* request,
                                       v1::Job* response) override {
    return Change(*context, "SuspendJob", request->name(), response,
                  [request](Controller& controller, Controller::Reply reply) {
                    controller.SuspendJob(request->name(), std::move(reply));
                  });
  }

  grpc::ServerUnaryReactor* ResumeJob(grpc::CallbackServerContext* context,
                                      const v1::ResumeJobRequest* request,
                                      v1::Job* response) override {
    return Change(*context, "ResumeJob", request->name(), response,
                  [request](Controller& controller, Controller::Reply reply) {
                    controller.ResumeJob(request->name(), std::move(reply));
                  });
  }

  grpc::ServerUnaryReactor* CheckpointJob(grpc::CallbackServerContext* context,
                                          const v1::CheckpointJobRequest* request,
                                          v1::CheckpointJobResponse* response) override {
    const UnaryCall call(services_, *context, "CheckpointJob");
    if (!call.ok()) return call.reactor();
    if (const Status status = CheckJobName(request->name()); !status.ok()) {
      call.Finish(status);
      return call.reactor();
    }
    services_.loop->Post([=](Controller& controller) {
      controller.CheckpointJob(request->name(), [=](Result<internal::v1::CheckpointDone> done) {
        if (!done.ok()) return call.Finish(done.status());
        response->set_durable_step(done->step());
        response->set_path(done->path());
        call.Finish(Status::Ok());
      });
    });
    return call.reactor();
  }

  grpc::ServerWriteReactor<v1::JobEvent>* WatchJobs(grpc::CallbackServerContext* context,
                                                    const v1::WatchJobsRequest* request) override {
    return oom::WatchJobs(services_, *context, *request);
  }

  grpc::ServerWriteReactor<v1::LogChunk>* StreamLogs(
      grpc::CallbackServerContext* context, const v1::StreamLogsRequest* request) override {
    return oom::StreamLogs(services_, *context, *request);
  }

 private:
  void PlanAndCreate(const UnaryCall& call, const v1::CreateJobRequest* request, uint64_t hash,
                     v1::Job* response) {
    Result<PlannedJob> planned =
        services_.plan(request->job().spec(), LimitsNow(services_, request->job().spec()));
    if (!planned.ok()) return call.Finish(planned.status());
    if (IsGeometry(request->job().spec())) {
      // Never a job: neither the node's devices nor the queue have a say.
      v1::Job sized;
      *sized.mutable_spec() = std::move(planned->spec);
      *sized.mutable_plan() = std::move(planned->plan);
      *sized.mutable_model() = std::move(planned->model);
      return call.Finish(Result<v1::Job>(std::move(sized)), response);
    }
    Controller::NewJob job{.job_id = request->job_id(),
                           .owner = call.caller(),
                           .request_id = request->request_id(),
                           .payload_hash = hash,
                           .validate_only = request->validate_only()};
    *job.job.mutable_spec() = std::move(planned->spec);
    *job.job.mutable_plan() = std::move(planned->plan);
    *job.job.mutable_model() = std::move(planned->model);
    job.pools = std::move(planned->pools);
    services_.loop->Post([call, response, job = std::move(job)](Controller& controller) mutable {
      controller.CreateJob(std::move(job), [=](Result<v1::Job> created) {
        call.Finish(std::move(created), response);
      });
    });
  }

  template <class Action>
  grpc::ServerUnaryReactor* Change(grpc::CallbackServerContext& context, const char* method,
                                   const std::string& name, v1::Job* response, Action action) {
    const UnaryCall call(services_, context, method);
    if (!call.ok()) return call.reactor();
    if (const Status status = CheckJobName(name); !status.ok()) {
      call.Finish(status);
      return call.reactor();
    }
    services_.loop->Post([=](Controller& controller) {
      action(controller, [=](Result<v1::Job> job) { call.Finish(std::move(job), response); });
    });
    return call.reactor();
  }

  ServiceContext& services_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeJobService(ServiceContext& services) {
  return std::make_unique<JobServiceImpl>(services);
}

}  // namespace oom
