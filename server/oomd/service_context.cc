#include "server/oomd/service_context.h"

#include <cstdlib>

#include "server/oomd/status_details.h"

namespace oom {

void PeerTable::Add(int fd, uid_t uid) {
  const MutexLock lock(mutex_);
  uids_[fd] = uid;
}

Result<uid_t> PeerTable::Find(const std::string& peer) const {
  if (peer.rfind("fd:", 0) == 0) {
    const MutexLock lock(mutex_);
    const auto it = uids_.find(std::atoi(peer.c_str() + 3));
    if (it != uids_.end()) return it->second;
  }
  return Status(Code::kUnauthenticated, "the caller's identity is not known")
      .WithReason("UNKNOWN_PEER");
}

Result<uid_t> ServiceContext::Authorize(const grpc::CallbackServerContext& context) const {
  OOM_ASSIGN_OR_RETURN(const uid_t uid, peers.Find(context.peer()));
  if (allowed_uids.contains(uid)) return uid;
  return Status(Code::kPermissionDenied, "uid " + std::to_string(uid) + " may not use this daemon")
      .WithReason("NOT_ALLOWED");
}

Status DaemonStopping() {
  return Status(Code::kUnavailable, "the daemon is stopping").WithReason("SHUTTING_DOWN");
}

UnaryCall::UnaryCall(ServiceContext& services, grpc::CallbackServerContext& context,
                     const char* method)
    : services_(services), reactor_(context.DefaultReactor()), method_(method) {
  const Result<uid_t> caller = services.Authorize(context);
  ok_ = caller.ok();
  if (ok_) {
    caller_ = caller.value();
  } else {
    Finish(caller.status());
  }
}

void UnaryCall::Finish(const Status& status) const {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin_;
  services_.metrics->CountRequest(method_, std::string(CodeName(status.code())), took.count());
  reactor_->Finish(ToGrpc(status));
}

}  // namespace oom
