// RpcServer is the gRPC server on the daemon's Unix socket: the two services, health, reflection,
// the limits of a call, and an accept loop of its own, because only there the peer's uid is known.
// Thread-safe but for Start.

#pragma once

#include <memory>
#include <string>

#include "runtime/base/status.h"
#include "server/oomd/service_context.h"
#include "server/oomd/unix_socket.h"

namespace oom {

class RpcServer {
 public:
  // `services` outlive the server. Fails with kInternal.
  static Result<std::unique_ptr<RpcServer>> Start(ServiceContext& services, ListeningSocket socket);
  // Ends calls that are still open after two seconds. The control loop must still run.
  void Shutdown();
  // The "readiness" service, and with it "" and "oom.v1.JobService"; "liveness" serves to the end.
  void SetReady(bool ready);
  ~RpcServer();

 private:
  struct Impl;
  explicit RpcServer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
