// What the gRPC services share: the control loop, what readers may see, who calls, and how a call
// ends. Thread-safe; outlives the server.

#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "planner/plan_job.h"
#include "runtime/memory/numa.h"
#include "server/oomd/control_loop.h"
#include "server/oomd/gpu_inventory.h"
#include "server/oomd/metrics.h"

namespace oom {

using PlanFunction = std::function<Result<PlannedJob>(const v1::JobSpec&, const NodeLimits&)>;

// The uid behind each connection. gRPC names a connection that it was given as "fd:<number>".
class PeerTable {
 public:
  void Add(int fd, uid_t uid);
  // Fails with kUnauthenticated for a peer that is not in the table.
  Result<uid_t> Find(const std::string& peer) const;

 private:
  mutable Mutex mutex_;
  std::map<int, uid_t> uids_ OOM_GUARDED_BY(mutex_);
};

struct ServiceContext {
  ControlLoop* loop = nullptr;
  const JobView* view = nullptr;
  EventLog* events = nullptr;  // On the control thread.
  Store* store = nullptr;      // ReadEvents only.
  Metrics* metrics = nullptr;
  NumaTopology* topology = nullptr;
  PlanFunction plan;
  NodeLimits limits;
  std::vector<Gpu> gpus;
  std::string gpu_problem;  // Empty, or why there are no more.
  bool allow_hugetlb = true;
  std::string store_id;
  std::string node_name;
  std::string version;
  std::string memory_limit_source;
  std::set<uid_t> allowed_uids;
  std::chrono::steady_clock::time_point start_time = std::chrono::steady_clock::now();
  std::atomic<bool> stopping = false;
  // Of those that follow logs: a stream is ended before the server is shut down.
  std::chrono::milliseconds log_poll_interval{200};
  PeerTable peers;
  boost::asio::thread_pool planners{2};

  // The caller, if it may use this daemon. kUnauthenticated, kPermissionDenied.
  Result<uid_t> Authorize(const grpc::CallbackServerContext& context) const;
};

// kUnavailable, SHUTTING_DOWN.
Status DaemonStopping();

// One unary call: authorised at its start, counted and answered once.
class UnaryCall {
 public:
  UnaryCall(ServiceContext& services, grpc::CallbackServerContext& context, const char* method);

  // Not OK: the call is answered already.
  bool ok() const { return ok_; }
  uid_t caller() const { return caller_; }
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }
  void Finish(const Status& status) const;
  // Writes `result` into `response` if it is OK.
  template <class T>
  void Finish(Result<T> result, T* response) const {
    if (result.ok()) *response = std::move(result.value());
    Finish(result.ok() ? Status::Ok() : result.status());
  }

 private:
  ServiceContext& services_;
  grpc::ServerUnaryReactor* const reactor_;
  const char* const method_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  bool ok_ = false;
  uid_t caller_ = 0;
};

}  // namespace oom
