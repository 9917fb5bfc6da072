// Jobs of a daemon over its socket: their runs, stops, lost hosts, logs and metrics, and what is
// left of them when the daemon ends. Server, store and processes are real; the planner and the job
// host are fakes.
#include "server/oomd/daemon.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "runtime/base/unique_fd.h"
#include "server/jobhost/host_pid_file.h"
#include "server/oomd/host_process.h"
#include "tests/server/daemon_fixture.h"

namespace oom {
namespace {

using grpc::ClientContext;
using grpc::StatusCode;

std::string Scrape(const std::string& address) {
  const int port = std::stoi(address.substr(address.find(':') + 1));
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in target = {};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<uint16_t>(port));
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&target), sizeof(target)) != 0) return "";
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  if (write(fd.get(), request.data(), request.size()) < 0) return "";
  std::string text;
  char block[65536];
  for (ssize_t got; (got = read(fd.get(), block, sizeof(block))) > 0;)
    text.append(block, static_cast<size_t>(got));
  return text;
}

TEST_F(DaemonTest, AJobRunsToItsEndAndItsLogsAndMetricsTellOfIt) {
  config_.metrics_port = 0;
  Start();
  const v1::Job created = MustCreate("a", {{"steps", "8"}});
  EXPECT_EQ(created.name(), "jobs/a");
  EXPECT_EQ(created.state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(created.uid_owner(), geteuid());
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_SUCCEEDED));
  EXPECT_EQ(Get("a").step(), 8);
  EXPECT_EQ(Get("a").durable_step(), 8);
  EXPECT_EQ(Get("a").progress(), 1.0);

  ClientContext context;
  v1::StreamLogsRequest request;
  request.set_name("jobs/a");
  request.set_follow(true);  // Ends by itself, because the job has.
  const auto stream = jobs_->StreamLogs(&context, request);
  v1::LogChunk chunk;
  std::vector<std::string> lines;
  int64_t third_offset = 0;
  while (stream->Read(&chunk)) {
    EXPECT_EQ(chunk.rank(), 0);
    EXPECT_EQ(chunk.attempt(), 1);
    lines.push_back(chunk.line());
    if (lines.size() == 3) third_offset = chunk.offset_bytes();
  }
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_EQ(lines.size(), 8U);
  EXPECT_EQ(lines[7], "step 8 line 0");
  ClientContext tail_context;
  request.set_since_offset_bytes(third_offset);
  const auto rest = jobs_->StreamLogs(&tail_context, request);
  ASSERT_TRUE(rest->Read(&chunk));
  EXPECT_EQ(chunk.line(), "step 4 line 0");
  tail_context.TryCancel();  // Finish() waits for what is not read otherwise.
  static_cast<void>(rest->Finish());

  ClientContext node_context;
  v1::Node node;
  ASSERT_TRUE(node_->GetNode(&node_context, {}, &node).ok());
  EXPECT_EQ(node.metrics_address(), daemon_->metrics_address());
  EXPECT_EQ(node.devices_size() >= 4, true);
  EXPECT_EQ(node.memory_limit_source(), "configuration");
  ASSERT_TRUE(Eventually([&] {
    return Scrape(daemon_->metrics_address()).find("oomd_jobs{state=\"SUCCEEDED\"} 1") !=
           std::string::npos;
  }));
  const std::string text = Scrape(daemon_->metrics_address());
  for (const char* wanted :
       {"oomd_build_info{version=\"test\"} 1", "oomd_ready 1", "oomd_job_step{job=\"a\"} 8",
        "oomd_pool_used_bytes{numa_node=\"0\"} 0",
        "oomd_job_transitions_total{reason=\"\",state=\"SUCCEEDED\"} 1",
        "oomd_job_tokens_total{job=\"a\"} 800",
        "oomd_grpc_requests_total{grpc_code=\"OK\",method=\"CreateJob\"} 1",
        "oomd_store_commit_duration_seconds_count"}) {
    EXPECT_NE(text.find(wanted), std::string::npos) << wanted << " is not in\n" << text;
  }
}

TEST_F(DaemonTest, CheckpointSuspendResumeAndCancelReachTheHost) {
  Start();
  MustCreate("a", {{"steps", "0"}});
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_RUNNING));
  ASSERT_TRUE(Eventually([&] { return Get("a").step() > 2; }));
  v1::CheckpointJobResponse checkpoint;
  {
    ClientContext context;
    v1::CheckpointJobRequest request;
    request.set_name("jobs/a");
    ASSERT_TRUE(jobs_->CheckpointJob(&context, request, &checkpoint).ok());
  }
  EXPECT_GT(checkpoint.durable_step(), 2);
  EXPECT_GE(Get("a").durable_step(), checkpoint.durable_step());
  v1::Job job;
  {
    ClientContext context;
    v1::SuspendJobRequest request;
    request.set_name("jobs/a");
    ASSERT_TRUE(jobs_->SuspendJob(&context, request, &job).ok());
  }
  EXPECT_EQ(job.state(), v1::JOB_STATE_STOPPING);
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_SUSPENDED));
  {
    ClientContext context;
    v1::ResumeJobRequest request;
    request.set_name("jobs/a");
    ASSERT_TRUE(jobs_->ResumeJob(&context, request, &job).ok());
  }
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_RUNNING));
  EXPECT_EQ(Get("a").attempt(), 2);
  EXPECT_GE(Get("a").durable_step(), checkpoint.durable_step());
  ASSERT_TRUE(Cancel("a", v1::CANCEL_MODE_NOW, &job).ok());
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_CANCELLED));
  EXPECT_EQ(Get("a").reason(), "USER_CANCEL");
}

TEST_F(DaemonTest, AHostThatIsKilledIsReplacedAndGoesOnFromItsDurableStep) {
  Start();
  MustCreate("a", {{"steps", "12"}, {"die_at_step", "6"}});
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_SUCCEEDED));
  EXPECT_EQ(Get("a").attempt(), 2);
  EXPECT_EQ(Get("a").failure_count(), 1);
  MustCreate("b", {{"steps", "12"}, {"die_at_step", "6"}, {"die_attempts", "9"}});
  ASSERT_TRUE(WaitFor("b", v1::JOB_STATE_FAILED));
  EXPECT_EQ(Get("b").reason(), "RETRIES_EXHAUSTED");
}

TEST_F(DaemonTest, AJobHostThatIsNoProgramFailsItsJobWithAReason) {
  config_.jobhost_path = "/nonexistent/oom-jobhost";
  Start();
  MustCreate("a");
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_FAILED));
  EXPECT_NE(Get("a").message().find("/nonexistent/oom-jobhost"), std::string::npos)
      << Get("a").message();
}

TEST_F(DaemonTest, RunningJobsOutliveTheDaemonAndAWatchResumesWithoutLossOrRepetition) {
  Start();
  std::vector<int64_t> sequences;
  std::string token;
  // Reads until `done` says so; then leaves.
  const auto watch = [&](const std::function<bool(const v1::JobEvent&)>& done) {
    ClientContext context;
    v1::WatchJobsRequest request;
    request.set_resume_token(token);
    const auto stream = jobs_->WatchJobs(&context, request);
    v1::JobEvent event;
    bool left = false;
    while (!left && stream->Read(&event)) {
      if (event.kind() == v1::JOB_EVENT_KIND_TRANSITION) sequences.push_back(event.sequence());
      if (!event.resume_token().empty()) token = event.resume_token();
      left = done(event);
    }
    if (left) context.TryCancel();
    return stream->Finish();
  };
  watch([](const v1::JobEvent& event) { return event.kind() == v1::JOB_EVENT_KIND_BOOKMARK; });
  MustCreate("a", {{"steps", "0"}});
  MustCreate("b", {{"steps", "0"}});
  watch([](const v1::JobEvent& event) {
    return event.job().name() == "jobs/a" && event.job().state() == v1::JOB_STATE_RUNNING;
  });
  ASSERT_TRUE(WaitFor("b", v1::JOB_STATE_RUNNING));
  const int64_t step = Get("a").step();
  daemon_.reset();
  // A suspend that comes while there is no daemon is the next daemon's; the host goes on meanwhile.
  Start();
  EXPECT_EQ(Get("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get("a").attempt(), 1) << "it was not started again";
  ASSERT_TRUE(Eventually([&] { return Get("a").step() > step; }));
  v1::Job job;
  ASSERT_TRUE(Cancel("a", v1::CANCEL_MODE_CHECKPOINT, &job).ok());
  ASSERT_TRUE(Cancel("b", v1::CANCEL_MODE_NOW, &job).ok());
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_CANCELLED) && WaitFor("b", v1::JOB_STATE_CANCELLED));
  std::set<std::string> ended;
  watch([&](const v1::JobEvent& event) {
    if (event.job().state() == v1::JOB_STATE_CANCELLED) ended.insert(event.job().name());
    return ended.size() == 2;
  });
  for (size_t i = 0; i < sequences.size(); ++i)
    EXPECT_EQ(sequences[i], static_cast<int64_t>(i) + 1);
  EXPECT_GE(sequences.size(), 10U);

  token = "not.a.token";
  const grpc::Status bad = watch([](const v1::JobEvent&) { return false; });
  EXPECT_EQ(bad.error_code(), StatusCode::INVALID_ARGUMENT);
}

TEST_F(DaemonTest, ShutdownEndsStreamsWithUnavailableAndAnEphemeralDaemonEndsItsJobs) {
  config_.ephemeral = true;
  Start();
  MustCreate("a", {{"steps", "0"}});
  ASSERT_TRUE(WaitFor("a", v1::JOB_STATE_RUNNING));
  ClientContext context;
  const auto stream = jobs_->WatchJobs(&context, {});
  v1::JobEvent event;
  ASSERT_TRUE(stream->Read(&event));
  ClientContext log_context;
  v1::StreamLogsRequest logs;
  logs.set_name("jobs/a");
  logs.set_follow(true);
  const auto log_stream = jobs_->StreamLogs(&log_context, logs);
  const Result<HostProcess> host = FindHost(directory_ + "/jobs/" + Get("a").uid());
  ASSERT_TRUE(host.ok());
  const auto begin = std::chrono::steady_clock::now();
  daemon_->Shutdown();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  bool suspended = false;
  while (stream->Read(&event)) suspended |= event.job().state() == v1::JOB_STATE_SUSPENDED;
  EXPECT_TRUE(suspended) << "the watcher sees the end of the job first";
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Details(status).has_retry);
  v1::LogChunk chunk;
  while (log_stream->Read(&chunk)) {
  }
  EXPECT_EQ(log_stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(ProcessStartTicks(host->pid), 0U) << "the job host is still there";
}

}  // namespace
}  // namespace oom
