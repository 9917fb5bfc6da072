// The daemon over its socket: a real server, store and processes; the planner and the job host are
// fakes.
#include "server/oomd/daemon.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "oom/v1/job.grpc.pb.h"
#include "oom/v1/node.grpc.pb.h"
#include "runtime/base/file.h"
#include "server/oomd/host_process.h"
#include "server/oomd/unix_socket.h"
#include "tests/server/fake_planner.h"

namespace oom {
namespace {

using grpc::ClientContext;
using grpc::StatusCode;

// Polls `condition` until it holds; false after half a minute.
bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    poll(nullptr, 0, 5);
  }
  return true;
}

std::shared_ptr<grpc::Channel> Connect(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A connection of its own.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

// The details of an error, by type.
struct Details {
  explicit Details(const grpc::Status& status) {
    google::rpc::Status all;
    EXPECT_TRUE(all.ParseFromString(status.error_details()));
    EXPECT_EQ(all.code(), status.error_code());
    EXPECT_EQ(all.message(), status.error_message());
    for (const auto& each : all.details()) {
      if (each.UnpackTo(&info)) ++infos;
      each.UnpackTo(&bad_request);
      each.UnpackTo(&precondition);
      each.UnpackTo(&quota);
      has_retry |= each.UnpackTo(&retry);
    }
    EXPECT_EQ(infos, 1) << "each error has one ErrorInfo";
    EXPECT_EQ(info.domain(), "oomd");
  }
  int infos = 0;
  bool has_retry = false;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  google::rpc::PreconditionFailure precondition;
  google::rpc::QuotaFailure quota;
  google::rpc::RetryInfo retry;
};

class DaemonTest : public testing::Test {
 protected:
  DaemonTest() {
    char name[] = "/tmp/oomd-XXXXXX";
    directory_ = mkdtemp(name);
    config_.state_dir = directory_;
    config_.socket = directory_ + "/s";
    config_.jobhost_path = OOM_FAKE_JOBHOST;
    config_.worker_path = "/nonexistent";
    config_.metrics_port = -1;  // Its server takes two seconds to stop.
    config_.backoff_initial_seconds = 0.01;
    config_.stop_slack_seconds = 20;
    config_.pool_capacity_bytes = {64_MiB};
    config_.cpu_devices = 4;
  }
  ~DaemonTest() override {
    // Whatever a test left running ends with it, by the pid that it wrote down.
    daemon_.reset();
    for (const auto& entry : std::filesystem::directory_iterator(directory_ + "/jobs")) {
      const Result<HostProcess> host = FindHost(entry.path());
      if (host.ok()) kill(host->pid, SIGKILL);
    }
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    std::filesystem::remove_all(directory_);
  }

  void Start() {
    Daemon::Options options{.config = config_, .plan = FakePlan, .version = "test"};
    auto daemon = Daemon::Start(std::move(options));
    ASSERT_TRUE(daemon.ok()) << daemon.status().ToString();
    daemon_ = std::move(daemon.value());
    channel_ = Connect(config_.socket);
    jobs_ = v1::JobService::NewStub(channel_);
    node_ = v1::NodeService::NewStub(channel_);
  }

  v1::CreateJobRequest Request(const std::string& id,
                               const std::map<std::string, std::string>& labels = {}) {
    v1::CreateJobRequest request;
    request.set_job_id(id);
    v1::JobSpec& spec = *request.mutable_job()->mutable_spec();
    spec.set_name(id.empty() ? "unnamed" : id);
    spec.set_output(directory_ + "/out-" + id);
    for (const auto& [key, value] : labels) (*spec.mutable_labels())[key] = value;
    return request;
  }
  grpc::Status Create(const v1::CreateJobRequest& request, v1::Job* job) {
    ClientContext context;
    return jobs_->CreateJob(&context, request, job);
  }
  v1::Job MustCreate(const std::string& id, const std::map<std::string, std::string>& labels = {}) {
    v1::Job job;
    const grpc::Status status = Create(Request(id, labels), &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }
  v1::Job Get(const std::string& id) {
    ClientContext context;
    v1::GetJobRequest request;
    request.set_name("jobs/" + id);
    v1::Job job;
    EXPECT_TRUE(jobs_->GetJob(&context, request, &job).ok());
    return job;
  }
  bool WaitFor(const std::string& id, v1::JobState state) {
    return Eventually([&] { return Get(id).state() == state; });
  }
  grpc::Status Cancel(const std::string& id, v1::CancelMode mode, v1::Job* job) {
    ClientContext context;
    v1::CancelJobRequest request;
    request.set_name("jobs/" + id);
    request.set_mode(mode);
    return jobs_->CancelJob(&context, request, job);
  }
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

  std::string directory_;
  Config config_;
  std::unique_ptr<Daemon> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::NodeService::Stub> node_;
};

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

TEST_F(DaemonTest, ASecondDaemonIsRefusedOnTheSameSocketAndOnTheSameState) {
  Start();
  Config other = config_;
  other.state_dir = directory_ + "/other";
  Result<std::unique_ptr<Daemon>> second =
      Daemon::Start({.config = other, .plan = FakePlan, .version = "test"});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().reason(), "ALREADY_RUNNING") << second.status().ToString();
  other = config_;
  other.socket = directory_ + "/s2";
  second = Daemon::Start({.config = other, .plan = FakePlan, .version = "test"});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().reason(), "ALREADY_RUNNING") << second.status().ToString();
  EXPECT_EQ(MustCreate("still", {{"steps", "1"}}).name(), "jobs/still");
}

TEST_F(DaemonTest, AStateDirectoryTooLongForTheSocketsOfJobsIsRefusedAndTheLongestWorks) {
  std::filesystem::create_directories(directory_ + "/jobs");
  // Of 107 characters "/jobs/", 36 of the job and "/host.sock" take 52.
  config_.state_dir = directory_ + "/" + std::string(55 - directory_.size() - 1, 'x');
  Config longer = config_;
  longer.state_dir += "x";
  const auto refused = Daemon::Start({.config = longer, .plan = FakePlan, .version = "test"});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument) << refused.status().ToString();
  EXPECT_EQ(refused.status().field(), "state_dir");
  EXPECT_FALSE(std::filesystem::exists(longer.state_dir));
  Start();
  MustCreate("a", {{"steps", "2"}});
  EXPECT_TRUE(WaitFor("a", v1::JOB_STATE_SUCCEEDED));
}

TEST_F(DaemonTest, OnlyTheDaemonsUserAndRootAreAnswered) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  Start();
  // Even if somebody opened the socket's mode.
  ASSERT_EQ(chmod(directory_.c_str(), 0711), 0);
  ASSERT_EQ(chmod(config_.socket.c_str(), 0666), 0);
  // The connection is made as another user; SO_PEERCRED remembers that.
  const pid_t child = fork();
  if (child == 0) {
    int code = 255;
    if (setuid(65534) == 0) {
      const Result<UniqueFd> fd = ConnectUnix(config_.socket);
      if (fd.ok()) {
        // The HTTP/2 preface, empty settings, and a GetNode call with literal headers.
        std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        bytes += std::string("\0\0\0\4\0\0\0\0\0", 9);
        std::string headers;
        const auto literal = [&](const std::string& name, const std::string& value) {
          headers += '\0';
          headers += static_cast<char>(name.size());
          headers += name;
          headers += static_cast<char>(value.size());
          headers += value;
        };
        literal(":method", "POST");
        literal(":scheme", "http");
        literal(":path", "/oom.v1.NodeService/GetNode");
        literal(":authority", "localhost");
        literal("te", "trailers");
        literal("content-type", "application/grpc");
        bytes += std::string("\0\0", 2) + static_cast<char>(headers.size()) +
                 std::string("\1\4\0\0\0\1", 6) + headers;
        bytes += std::string("\0\0\5\0\1\0\0\0\1\0\0\0\0\0", 14);
        std::string reply;
        char block[4096];
        if (write(fd->get(), bytes.data(), bytes.size()) > 0) {
          for (ssize_t got; (got = read(fd->get(), block, sizeof(block))) > 0;) {
            reply.append(block, static_cast<size_t>(got));
            if (reply.find("NOT_ALLOWED") != std::string::npos ||
                reply.find("uid 65534 may not") != std::string::npos) {
              code = 7;
              break;
            }
          }
        }
      }
    }
    _exit(code);
  }
  int status = 0;
  ASSERT_TRUE(Eventually([&] { return waitpid(child, &status, WNOHANG) == child; }));
  EXPECT_EQ(WEXITSTATUS(status), 7) << "another user was not refused";
}

}  // namespace
}  // namespace oom
