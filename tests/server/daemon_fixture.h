// A real daemon (server, store, processes) on a temporary folder, with clients of its socket; the
// planner and the job host are fakes. What a test left running ends with it.

#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "oom/v1/job.grpc.pb.h"
#include "oom/v1/node.grpc.pb.h"
#include "server/oomd/daemon.h"

namespace oom {

// Polls `condition` until it holds; false after half a minute.
bool Eventually(const std::function<bool()>& condition);

// The details of an error, by type.
struct Details {
  explicit Details(const grpc::Status& status);
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
  DaemonTest();
  ~DaemonTest() override;

  // A daemon with `config_`, and new stubs.
  void Start();

  // Labels tell the fakes what to do: fake_planner.h and fake_jobhost.cc.
  v1::CreateJobRequest Request(const std::string& id,
                               const std::map<std::string, std::string>& labels = {});
  grpc::Status Create(const v1::CreateJobRequest& request, v1::Job* job);
  v1::Job MustCreate(const std::string& id, const std::map<std::string, std::string>& labels = {});
  v1::Job Get(const std::string& id);
  bool WaitFor(const std::string& id, v1::JobState state);
  grpc::Status Cancel(const std::string& id, v1::CancelMode mode, v1::Job* job);

  std::string directory_;
  Config config_;
  std::unique_ptr<Daemon> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::NodeService::Stub> node_;
};

}  // namespace oom
