// What a daemon answers to single requests: errors with their details, hostile sizes, request ids,
// pages, health.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <set>
#include <string>
#include <vector>

#include "server/oomd/unix_socket.h"
#include "tests/server/daemon_fixture.h"

namespace oom {
namespace {

using grpc::ClientContext;
using grpc::StatusCode;

TEST_F(DaemonTest, ErrorsCarryDetails) {
  Start();
  v1::Job job;
  // The planner's refusal names the field.
  Details invalid(Create(Request("x", {{"refuse", "1"}}), &job));
  EXPECT_EQ(invalid.info.reason(), "INVALID_INPUT");
  ASSERT_EQ(invalid.bad_request.field_violations_size(), 1);
  EXPECT_EQ(invalid.bad_request.field_violations(0).field(), "optimizer.betas");

  const grpc::Status large = Create(Request("x", {{"bytes", "999999999"}}), &job);
  EXPECT_EQ(large.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  Details quota(large);
  EXPECT_EQ(quota.info.reason(), "OUT_OF_HOST_MEMORY");
  EXPECT_EQ(quota.quota.violations_size(), 1);
  EXPECT_FALSE(quota.has_retry);

  MustCreate("done", {{"steps", "1"}});
  ASSERT_TRUE(WaitFor("done", v1::JOB_STATE_SUCCEEDED));
  const grpc::Status exists = Create(Request("done"), &job);
  EXPECT_EQ(exists.error_code(), StatusCode::ALREADY_EXISTS);
  const grpc::Status ended = Cancel("done", v1::CANCEL_MODE_NOW, &job);
  EXPECT_EQ(ended.error_code(), StatusCode::FAILED_PRECONDITION);
  Details precondition(ended);
  ASSERT_EQ(precondition.precondition.violations_size(), 1);
  EXPECT_EQ(precondition.precondition.violations(0).type(), "JOB_SUCCEEDED");
  const grpc::Status missing = Cancel("nobody", v1::CANCEL_MODE_NOW, &job);
  EXPECT_EQ(missing.error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Details(missing).info.reason(), "JOB_NOT_FOUND");
  ClientContext context;
  v1::GetJobRequest get;
  get.set_name("../etc");
  EXPECT_EQ(jobs_->GetJob(&context, get, &job).error_code(), StatusCode::INVALID_ARGUMENT);
}

TEST_F(DaemonTest, OversizedAndGarbageRequestsLeaveTheDaemonAlone) {
  Start();
  v1::CreateJobRequest huge = Request("huge");
  (*huge.mutable_job()->mutable_spec()->mutable_labels())["k"] = std::string(5 << 20, 'x');
  v1::Job job;
  EXPECT_EQ(Create(huge, &job).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  v1::CreateJobRequest large = Request("large");
  large.mutable_job()->mutable_spec()->set_plan("/" + std::string(2 << 20, 'x'));
  EXPECT_EQ(Create(large, &job).error_code(), StatusCode::INVALID_ARGUMENT);
  {
    const Result<UniqueFd> raw = ConnectUnix(config_.socket);
    ASSERT_TRUE(raw.ok());
    const std::string garbage(100000, '\xfe');
    static_cast<void>(!send(raw->get(), garbage.data(), garbage.size(), MSG_NOSIGNAL));
  }
  EXPECT_EQ(MustCreate("after", {{"steps", "0"}}).name(), "jobs/after");
}

TEST_F(DaemonTest, RequestIdsAndValidateOnlyBehaveAsPromised) {
  Start();
  v1::CreateJobRequest request = Request("", {{"steps", "0"}});
  request.set_request_id("11111111-2222");
  v1::Job first;
  v1::Job second;
  ASSERT_TRUE(Create(request, &first).ok());
  ASSERT_TRUE(Create(request, &second).ok());
  EXPECT_EQ(first.uid(), second.uid());
  EXPECT_EQ(first.SerializeAsString(), second.SerializeAsString());
  request.mutable_job()->mutable_spec()->set_steps(99);
  const grpc::Status reused = Create(request, &second);
  EXPECT_EQ(reused.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Details(reused).info.reason(), "REQUEST_ID_REUSED");
  v1::CreateJobRequest only = Request("only");
  only.set_validate_only(true);
  v1::Job validated;
  ASSERT_TRUE(Create(only, &validated).ok());
  EXPECT_EQ(validated.spec().steps(), 10) << "defaults are filled in";
  EXPECT_EQ(validated.plan().rank_count(), 1);
  ClientContext context;
  v1::GetJobRequest get;
  get.set_name("jobs/only");
  EXPECT_EQ(jobs_->GetJob(&context, get, &validated).error_code(), StatusCode::NOT_FOUND);
}

TEST_F(DaemonTest, PagesHoldEachJobOnceAlsoWhileJobsAreAdded) {
  Start();
  for (int i = 0; i < 25; ++i)
    MustCreate("j" + std::to_string(i), {{"steps", "0"}, {"bytes", "67108864"}});
  std::vector<std::string> names;
  v1::ListJobsRequest request;
  request.set_page_size(10);
  int added = 0;
  do {
    ClientContext context;
    v1::ListJobsResponse response;
    ASSERT_TRUE(jobs_->ListJobs(&context, request, &response).ok());
    EXPECT_LE(response.jobs_size(), 10);
    for (const v1::Job& job : response.jobs()) names.push_back(job.name());
    request.set_page_token(response.next_page_token());
    if (added++ < 2)
      MustCreate("late" + std::to_string(added), {{"steps", "0"}, {"bytes", "67108864"}});
  } while (!request.page_token().empty());
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size())
      << "a job came twice";
  EXPECT_EQ(names.size(), 27U);
  request.set_page_token("17-abc");
  ClientContext context;
  v1::ListJobsResponse response;
  EXPECT_EQ(jobs_->ListJobs(&context, request, &response).error_code(),
            StatusCode::INVALID_ARGUMENT);
}

// The health protocol has no generated code here; these messages have its wire format: a string in
// field 1, and a number in field 1 (1: SERVING, 2: NOT_SERVING).
TEST_F(DaemonTest, HealthNamesWhatServes) {
  Start();
  const auto health = [&](const std::string& service) {
    grpc::TemplatedGenericStub<v1::GetJobRequest, v1::LogChunk> stub(channel_);
    grpc::CompletionQueue queue;
    ClientContext context;
    v1::GetJobRequest request;
    request.set_name(service);
    const auto call =
        stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
    v1::LogChunk answer;
    grpc::Status status;
    call->StartCall();
    call->Finish(&answer, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status.ok() ? answer.rank() : -static_cast<int>(status.error_code());
  };
  for (const char* name : {"", "oom.v1.JobService", "liveness", "readiness"})
    EXPECT_EQ(health(name), 1) << name;
  EXPECT_EQ(health("nonsense"), -static_cast<int>(StatusCode::NOT_FOUND));
}

}  // namespace
}  // namespace oom
