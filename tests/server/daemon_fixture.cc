#include "tests/server/daemon_fixture.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <utility>

#include "google/rpc/status.pb.h"
#include "runtime/base/units.h"
#include "server/oomd/host_process.h"
#include "tests/server/fake_planner.h"

namespace oom {
namespace {

using grpc::ClientContext;

std::shared_ptr<grpc::Channel> Connect(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A connection of its own.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    poll(nullptr, 0, 5);
  }
  return true;
}

Details::Details(const grpc::Status& status) {
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

DaemonTest::DaemonTest() {
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

DaemonTest::~DaemonTest() {
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

void DaemonTest::Start() {
  Daemon::Options options{.config = config_, .plan = FakePlan, .version = "test"};
  auto daemon = Daemon::Start(std::move(options));
  ASSERT_TRUE(daemon.ok()) << daemon.status().ToString();
  daemon_ = std::move(daemon.value());
  channel_ = Connect(config_.socket);
  jobs_ = v1::JobService::NewStub(channel_);
  node_ = v1::NodeService::NewStub(channel_);
}

v1::CreateJobRequest DaemonTest::Request(const std::string& id,
                                         const std::map<std::string, std::string>& labels) {
  v1::CreateJobRequest request;
  request.set_job_id(id);
  v1::JobSpec& spec = *request.mutable_job()->mutable_spec();
  spec.set_name(id.empty() ? "unnamed" : id);
  spec.set_output(directory_ + "/out-" + id);
  for (const auto& [key, value] : labels) (*spec.mutable_labels())[key] = value;
  return request;
}

grpc::Status DaemonTest::Create(const v1::CreateJobRequest& request, v1::Job* job) {
  ClientContext context;
  return jobs_->CreateJob(&context, request, job);
}

v1::Job DaemonTest::MustCreate(const std::string& id,
                               const std::map<std::string, std::string>& labels) {
  v1::Job job;
  const grpc::Status status = Create(Request(id, labels), &job);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return job;
}

v1::Job DaemonTest::Get(const std::string& id) {
  ClientContext context;
  v1::GetJobRequest request;
  request.set_name("jobs/" + id);
  v1::Job job;
  EXPECT_TRUE(jobs_->GetJob(&context, request, &job).ok());
  return job;
}

bool DaemonTest::WaitFor(const std::string& id, v1::JobState state) {
  return Eventually([&] { return Get(id).state() == state; });
}

grpc::Status DaemonTest::Cancel(const std::string& id, v1::CancelMode mode, v1::Job* job) {
  ClientContext context;
  v1::CancelJobRequest request;
  request.set_name("jobs/" + id);
  request.set_mode(mode);
  return jobs_->CancelJob(&context, request, job);
}

}  // namespace oom
